"""Packs: structure by brute force, three attentions, and what is refused."""

import random
from dataclasses import fields, replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BertLMHeadModel,
    Gemma2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
)

import pack as pack_file
from pack import (
    BLOCK,
    action_hidden,
    bucket,
    check_model,
    draw,
    example,
    pack,
    pack_all,
    pack_history,
    pad,
    split,
    verify,
)
from tiny import SHAPE, V, random_calls, random_ids, tiny


def deep_calls(seed=0, n=40):
    """Calls over a three-letter alphabet: the tree branches at almost every token."""
    rng = random.Random(seed)

    def word(longest):
        return [rng.randrange(3) for _ in range(rng.randint(1, longest))]

    return [word(9) for _ in range(n)], [word(5) for _ in range(n)]


def states(packed):
    """For each action token, straight from the definition: what the row that predicts it sees, as
    (id, position) pairs, and the token."""
    ids, positions = packed.input_ids.tolist(), packed.position_ids.tolist()
    end, found = packed.subtree_end.tolist(), []
    for q, a in zip(packed.predict_idx.tolist(), packed.action_ids.tolist()):
        seen = [(ids[k], positions[k]) for k in range(q + 1) if q < end[k]]
        found.append((seen, a))
    return found


def wanted(prompts, actions):
    """The same from the calls: all that precedes the token, at positions 0, 1, 2, ..."""
    found = []
    for prompt, action in zip(prompts, actions):
        for k, a in enumerate(action):
            before = prompt + action[:k]
            found.append((list(zip(before, range(len(before)))), a))
    return found


def assert_same(packed, expected):
    for field in fields(expected):
        ours, theirs = getattr(packed, field.name), getattr(expected, field.name)
        assert torch.equal(ours, theirs), field.name


# ---- structure -----------------------------------------------------------------------------------
def test_picture_in_header_is_what_the_code_draws():
    """The header is the first thing that a reader trusts."""
    picture = [line.strip() for line in draw(*example()).splitlines()]
    header = [line.strip() for line in pack_file.__doc__.splitlines()]
    assert "\n".join(picture) in "\n".join(header)


@pytest.mark.parametrize("share", ["q", None, 0])
def test_every_action_token_has_its_state(share):
    """Eq. 3 by brute force. Would catch positions that do not restart, blocks that leak, a q that
    later blocks do not see (position_ids alone make transformers do so), and rows in depth-first
    instead of call order."""
    prompts, actions, prefix_lens = random_calls()
    limits = prefix_lens if share == "q" else share
    for p, a, limit in ((prompts, actions, limits), (*deep_calls(), None)):
        packed = pack(p, a, limit)
        assert states(packed) == wanted(p, a)
        call_idx = []
        for c, action in enumerate(a):
            call_idx += [c] * len(action)
        assert packed.call_idx.tolist() == call_idx
        assert packed.input_ids[packed.action_idx].equal(packed.action_ids)
        verify(packed, p, a)


def test_share_q_is_equation_4():
    """share = |q| for one task is [q, x_0, a_0, x_1, a_1, ...] to the letter. A kept response
    stands twice, as action and as context, and only the action is in m_act (Eq. 6: a mask by role
    would add the copy)."""
    q, actions = [1, 2], [[7, 8], [7, 9], [7]]
    prompts = [q, q + [7, 8, 5], q + [7, 9, 5]]
    packed = pack(prompts, actions, share=2)
    assert packed.input_ids.tolist() == q + [7, 8] + [7, 8, 5, 7, 9] + [7, 9, 5, 7]
    assert packed.position_ids.tolist() == [0, 1] + [2, 3] + [2, 3, 4, 5, 6] + [2, 3, 4, 5]
    assert packed.action_mask.nonzero()[:, 0].tolist() == [2, 3, 7, 8, 12]
    assert packed.action_mask.sum() == 5


def test_tree_shares_every_prefix_and_keeps_every_decision():
    """An append-only agent is one chain. Two calls that sampled the same token in the same state
    share a node, and remain two decisions."""
    chain = pack([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [[3], [5], [7, 8]])
    assert chain.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert chain.position_ids.tolist() == list(range(8))
    twice = pack([[1, 2], [1, 2]], [[3, 4], [3, 5]])
    assert twice.input_ids.tolist() == [1, 2, 3, 4, 5]
    assert twice.action_ids.tolist() == [3, 4, 3, 5]
    assert twice.action_mask.sum() == 3
    assert twice.predict_idx.tolist() == [1, 2, 1, 2]
    assert twice.call_idx.tolist() == [0, 0, 1, 1]


def test_one_row_predicts_several_first_tokens():
    """q = 1 2 3 and two calls with empty x that start 7 and 9: the row of 3 predicts both. Would
    catch labels by position."""
    model = tiny()
    packed = pack([[1, 2, 3], [1, 2, 3]], [[7], [9]], share=3)
    assert packed.predict_idx.tolist() == [2, 2]
    assert packed.action_ids.tolist() == [7, 9]
    logits = action_hidden(model, packed) @ model.lm_head.weight.T
    expected = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    assert_close(logits, expected.expand(2, -1), rtol=1e-4, atol=1e-4)


def test_history_is_one_growing_context_with_the_same_rows():
    """[q, a_0, o_0, a_1, o_1, ...], causal, with running positions, and (N,) in the order of `pack`
    of the calls."""
    actions, observations = [[4, 5], [6], [7]], [[10], [11, 12], []]
    packed = pack_history([1, 2], actions, observations)
    history = [1, 2, 4, 5, 10, 6, 11, 12, 7]
    assert packed.input_ids.tolist() == history
    expected = []
    for n, a in ((2, 4), (3, 5), (5, 6), (8, 7)):
        expected.append((list(zip(history[:n], range(n))), a))
    assert states(packed) == expected
    calls = pack([[1, 2], [1, 2, 10], [1, 2, 11, 12]], actions)
    assert packed.call_idx.equal(calls.call_idx) and packed.action_ids.equal(calls.action_ids)
    assert packed.input_ids[packed.action_idx].equal(packed.action_ids)
    with pytest.raises(ValueError):
        pack_history([1, 2], actions, observations[:2])


def test_padding_sees_itself_only():
    packed = pack([[1, 2]], [[3]], pad_to=5)
    assert packed.input_ids.tolist() == [1, 2, 3, 0, 0]
    assert packed.subtree_end.tolist() == [3, 3, 3, 4, 5]
    assert pad(packed, 4) is packed


def test_buckets_are_few_and_tight():
    sizes = {n: bucket(n) for n in range(1, 20000)}
    assert all(S >= n and S % BLOCK == 0 for n, S in sizes.items())
    assert all(S <= 1.25 * n for n, S in sizes.items() if n > 1024)
    assert len(set(sizes.values())) < 32


@pytest.mark.parametrize(
    "args, message",
    [
        (([[1, 2], [1]], [[3], []]), "call 1: empty action"),
        (([[]], [[3]]), "call 0: empty prompt"),
        (([], []), "at least one call"),
        (([[1]], [[2], [3]]), "1 prompts, 2 actions"),
        (([[1, 2, 3]], [[4, 5]], None, 4), r"call 0 has 3 \+ 2 tokens, over max_len = 4"),
    ],
)
def test_pack_refuses(args, message):
    """Nothing is cut: a limit that would remove a conditioning or sampled token is an error that
    names the call."""
    with pytest.raises(ValueError, match=message):
        pack(*args)


# ---- several packs -------------------------------------------------------------------------------
def agent_calls(tasks, seed=0):
    """Calls with the lengths of a compact-memory search agent: a protocol of 250 tokens, questions
    of 30 to 80, two to six calls per task, contexts of 250 to 650 tokens and responses of 60 to
    250. Ids are drawn from so many that nothing is shared by chance."""
    rng = random.Random(seed)

    def ids(low, high):
        return [rng.randrange(10**9) for _ in range(rng.randint(low, high))]

    protocol, prompts, actions, prefix_lens = ids(250, 250), [], [], []
    for _ in range(tasks):
        q = protocol + ids(30, 80)
        for t in range(rng.randint(2, 6)):
            prompts.append(q + (ids(250, 650) if t else []))
            actions.append(ids(60, 250))
            prefix_lens.append(len(q))
    return prompts, actions, prefix_lens


def assert_greedy(prompts, actions, max_tokens, share):
    """Every call once and in order, no pack over the budget, and no pack that could have taken the
    next call as well, by the sizes of the packs themselves. Returns the number of packs."""

    def size(run):
        return len(pack(prompts[run], actions[run], share[run]).input_ids)

    runs = split(prompts, actions, max_tokens, share)
    everything = []
    for run in runs:
        everything += range(run.start, run.stop)
        assert size(run) <= max_tokens
    assert everything == list(range(len(prompts)))
    for run in runs[:-1]:
        assert size(slice(run.start, run.stop + 1)) > max_tokens
    return len(runs)


@pytest.mark.parametrize("share", ["q", None])
@pytest.mark.parametrize("max_tokens", [1300, 4096, 16384])
def test_split_is_greedy(max_tokens, share):
    """Calls of a compact-memory agent, which share the protocol and their task's q."""
    prompts, actions, prefix_lens = agent_calls(32)
    limits = prefix_lens if share == "q" else [None] * len(prompts)
    assert assert_greedy(prompts, actions, max_tokens, limits) >= 4


@pytest.mark.parametrize("share", ["q", None])
def test_split_counts_what_calls_share(share):
    """Six identical calls, whose sampled tokens only a tree shares. Then a context that grows by
    five tokens: with the tree a call costs 7 more (a pack takes 6 calls, 2, and 1); with q alone it
    costs 5 t + 2 more (a pack takes 4 calls, then 1 each)."""
    calls = random_calls(tasks=6, calls=5)
    prompts, actions, prefix_lens = [part[:1] * 6 + part for part in calls]
    limits = prefix_lens if share == "q" else [None] * len(prompts)
    assert assert_greedy(prompts, actions, 60, limits) > 2
    prompts = [[1, 2, *range(10, 10 + 5 * t)] for t in range(9)]
    actions = [[7, 8]] * 9
    limits = [2 if share == "q" else None] * 9
    assert assert_greedy(prompts, actions, 45, limits) == (6 if share == "q" else 3)


@pytest.mark.parametrize("share", [[10, 0], [0, 10], [0, None], [None, 0]])
def test_split_counts_only_what_both_calls_share(share):
    """Ten tokens in common of which one call shares none: the two need 22 tokens, not 12."""
    prompts, actions = [[1] * 10, [1] * 10], [[2], [3]]
    assert len(pack(prompts, actions, share).input_ids) == 22
    assert len(split(prompts, actions, 21, share)) == 2
    assert len(split(prompts, actions, 22, share)) == 1


def test_split_names_a_call_that_no_pack_could_hold():
    """And cuts one huge task between its calls."""
    prompts = [[1, 2, 3] + [4] * t for t in range(40)]
    actions = [[5, 6]] * 40
    assert assert_greedy(prompts, actions, 60, [3] * 40) > 3
    with pytest.raises(ValueError, match="call 3 has 8 tokens, over the max_tokens = 7"):
        split(prompts, actions, 7, 3)
    assert split(prompts[:3], actions[:3], 7, 3)
    assert split([], [], 7) == []


@pytest.mark.parametrize("share", ["q", None])
def test_pack_all_packs_each_run(share):
    """What `split` cuts, one share for all calls or one for each, and the limit of a call."""
    prompts, actions, prefix_lens = random_calls(tasks=6, calls=5)
    limits = prefix_lens if share == "q" else [None] * len(prompts)
    runs = split(prompts, actions, 60, limits)
    packs = pack_all(prompts, actions, 60, limits if share == "q" else None)
    assert len(packs) == len(runs) > 2
    for packed, run in zip(packs, runs):
        assert_same(packed, pack(prompts[run], actions[run], limits[run]))
        verify(packed, prompts[run], actions[run])
    with pytest.raises(ValueError, match="over the max_tokens = 3"):
        pack_all(prompts, actions, 3)
    with pytest.raises(ValueError, match="over max_len = 3"):
        pack_all(prompts, actions, 60, max_len=3)
    assert pack_all([], [], 60) == []


# ---- attention -----------------------------------------------------------------------------------
def tiles(mask, kind):
    """For each row of tiles the columns that a BlockMask lists, or for each column the rows."""
    counts = getattr(mask, f"{kind}_num_blocks")[0, 0].tolist()
    indices = getattr(mask, f"{kind}_indices")[0, 0].tolist()
    return [row[:n] for row, n in zip(indices, counts)]


@pytest.mark.parametrize("seed", range(8))
def test_block_mask_is_create_block_mask(seed):
    """The analytic BlockMask in all four index sets, partial and full, rows and columns, on random
    trees with padding. Full tiles need long runs without a branch, so that some calls are long."""
    rng = random.Random(seed)
    q, longest = random_ids(rng, 1, 400), 300 if seed % 2 else 20
    prompts = [q + random_ids(rng, 0, longest) for _ in range(rng.randint(1, 9))]
    actions = [random_ids(rng, 1, 90) for _ in prompts]
    share = rng.choice([None, len(q)])
    pad_to = BLOCK * rng.choice([1, 4])
    packed = pack(prompts, actions, share, pad_to=pad_to)
    S, end = len(packed.input_ids), packed.subtree_end

    def visible(b, h, q, k):
        return (k <= q) & (q < end[k])

    ours = packed.block_mask
    reference = create_block_mask(visible, None, None, S, S, device="cpu")
    assert ours.shape == reference.shape and S % BLOCK == 0
    for kind in ("kv", "full_kv", "q", "full_q"):
        assert tiles(ours, kind) == tiles(reference, kind), kind
    if seed % 2:
        assert ours.full_kv_num_blocks.sum() > 0 and ours.kv_num_blocks.sum() > 0


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_three_attentions_agree(kind):
    """FlexAttention (forward: it has no backward on a CPU), segments and the dense mask, with more
    heads than key-value heads."""
    model = tiny(kind)
    for prompts, actions in (random_calls()[:2], deep_calls()):
        packed = pack(prompts, actions, pad_to=3)
        with torch.no_grad():
            dense = action_hidden(model, packed, "dense")
            for backend in ("segments", "flex"):
                hidden = action_hidden(model, packed, backend)
                assert_close(hidden, dense, rtol=0, atol=2e-5)


def test_segments_and_dense_have_the_same_gradients():
    prompts, actions, _ = random_calls()
    grads = []
    for backend in ("dense", "segments"):
        model = tiny().double()
        hidden = action_hidden(model, pack(prompts, actions), backend)
        (hidden**2).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for dense, segments in zip(*grads, strict=True):
        assert_close(dense, segments, rtol=1e-9, atol=1e-9)


def test_blocks_do_not_leak():
    """Change a token of one block: the other blocks' hidden states do not move by a bit."""
    prompts, actions = [[1, 2, 3], [1, 2, 4, 5]], [[6, 7], [8, 9]]
    model = tiny()
    changed = [[1, 2, 30], prompts[1]]
    with torch.no_grad():
        before = action_hidden(model, pack(prompts, actions, share=2))
        after = action_hidden(model, pack(changed, actions, share=2))
    assert torch.equal(before[2:], after[2:])
    assert not torch.equal(before[:2], after[:2])


def test_gradient_checkpointing_carries_the_pack():
    prompts, actions, _ = random_calls()
    grads = []
    for checkpointing in (False, True):
        model = tiny().train()
        if checkpointing:
            # its name from transformers 5.24 on, and before
            enable = getattr(model, "activation_checkpointing_enable", None)
            (enable or model.gradient_checkpointing_enable)({"use_reentrant": False})
        hidden = action_hidden(model, pack(prompts, actions))
        (hidden**2).sum().backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    assert_close(*grads)


def test_masks_made_in_inference_mode_can_be_trained_through_afterwards():
    """A mask that scoring made and kept must not poison the update."""
    model, (prompts, actions, _) = tiny(), random_calls()
    packed = pack(prompts, actions, pad_to=BLOCK)
    with torch.inference_mode():
        for backend in ("segments", "dense"):
            action_hidden(model, packed, backend)
        assert not packed.block_mask.kv_indices.is_inference()
    for backend in ("segments", "dense"):
        action_hidden(model, packed, backend).sum().backward()
    masks = [mask for _, mask in packed.segments[1] if mask is not None]
    assert masks and not any(mask.is_inference() for mask in masks)


def test_without_a_pack_the_attention_is_sdpa():
    """Left-padded batches keep their mask: an attention registered without a mask function loses it
    silently."""
    ids = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        ours = tiny()(input_ids=ids, attention_mask=mask).logits
        sdpa = tiny(attention="sdpa")(input_ids=ids, attention_mask=mask).logits
        alone = tiny()(input_ids=torch.tensor([[5, 6]])).logits
    assert torch.equal(ours, sdpa)
    assert_close(ours[0, 2:], alone[0], rtol=0, atol=1e-4)


# ---- what is refused -----------------------------------------------------------------------------
def test_a_model_that_drops_the_pack_is_refused():
    """Else its tokens would all see each other, without a word."""
    stand_in = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    ids = torch.tensor([[1, 2, 3]])
    with pytest.raises(ValueError, match="was not handed the pack"):
        tiny().base_model(input_ids=ids, attention_mask=stand_in, use_cache=False)


def bump(packed, name, i, by=1):
    """One number changed, of one field."""
    field = getattr(packed, name).clone()
    field[i] += by
    return replace(packed, **{name: field})


@pytest.mark.parametrize(
    "name, message",
    [
        ("input_ids", "input_ids"),
        ("position_ids", "position_ids"),
        ("subtree_end", "visibility"),
        ("predict_idx", "predict_idx is off"),
        ("action_ids", "action_ids"),
        ("action_idx", "visibility|action_idx is not"),
        ("call_idx", "call order"),
    ],
)
def test_verify_names_a_corruption_anywhere(name, message):
    """One unit off in any place of any field, up or down, is found and named. (There is no padding,
    which no call reads.)"""
    prompts, actions, prefix_lens = random_calls(tasks=2, calls=3)
    for share in (prefix_lens, None):
        packed = pack(prompts, actions, share)
        for i in range(len(getattr(packed, name))):
            for by in (1, -1):
                with pytest.raises(ValueError, match=message):
                    verify(bump(packed, name, i, by), prompts, actions)


def test_verify_sees_swapped_calls():
    packed = pack([[1, 2], [1, 2, 3]], [[4], [5]])
    with pytest.raises(ValueError, match="call 0"):
        verify(packed, [[1, 2, 3], [1, 2]], [[5], [4]])


def test_verify_counts_the_action_tokens():
    """A pack with a call more than it was asked about, and one with a call less."""
    packed = pack([[1, 2], [1, 2, 3]], [[4], [5]])
    with pytest.raises(ValueError, match="action tokens"):
        verify(packed, [[1, 2]], [[4]])
    with pytest.raises(ValueError, match="call 2"):
        verify(packed, [[1, 2], [1, 2, 3], [1]], [[4], [5], [6]])


SMALL = {name: value for name, value in SHAPE.items() if name != "initializer_range"}
FULL = {"head_dim": 8, "layer_types": ["full_attention"] * 2}
WINDOW = {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 0}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}


@pytest.mark.parametrize(
    "config, message",
    [
        (MistralConfig(**SMALL, sliding_window=8), "sliding-window"),
        (Qwen2Config(**SMALL, **WINDOW), "sliding-window"),
        (Gemma2Config(**SMALL, **FULL), "softcap"),
        (GptOssConfig(**SMALL, **FULL, num_local_experts=2), "sinks"),
        (LlamaConfig(**SMALL, rope_parameters=DYNAMIC), "rotary"),
        (Qwen2Config(**SMALL, attention_dropout=0.1), "dropout"),
    ],
)
def test_models_that_packs_cannot_honour_are_refused_by_name(config, message):
    model = AutoModelForCausalLM.from_config(config, attn_implementation="packed").train()
    with pytest.raises(ValueError, match=message):
        action_hidden(model, pack([[1, 2]], [[3]]))


def test_dropout_is_fine_in_eval_mode_and_other_attentions_are_not():
    check_model(tiny(attention_dropout=0.1))
    with pytest.raises(ValueError, match='attn_implementation="packed"'):
        check_model(tiny(attention="sdpa"))
    config = BertConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        is_decoder=False,
    )
    encoder = BertLMHeadModel(config).eval()
    encoder.config._attn_implementation = "packed"
    with pytest.raises(ValueError, match="BertLMHeadModel .* differ by"):
        check_model(encoder)
