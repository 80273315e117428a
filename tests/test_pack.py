"""Packs: structure by brute force, three attentions, and what is refused."""

import os
import random
from dataclasses import replace

import pytest
import torch
from torch.nn.attention.flex_attention import create_block_mask
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
    pack_history,
    pad,
    split,
    verify,
)
from tiny import SHAPE, V, random_calls, random_ids, tiny


def deep_calls(seed=0, n=40):
    """Calls over a three-letter alphabet: the tree branches at almost every token."""
    rng = random.Random(seed)
    return (
        [[rng.randrange(3) for _ in range(rng.randint(1, 9))] for _ in range(n)],
        [[rng.randrange(3) for _ in range(rng.randint(1, 5))] for _ in range(n)],
    )


def states(packed):
    """For each action token, what the row that predicts it sees, straight from the definition: [(id,
    position), ...] and a."""
    S = len(packed.input_ids)
    return [
        (
            [
                (packed.input_ids[k].item(), packed.position_ids[k].item())
                for k in range(S)
                if k <= q < packed.subtree_end[k]
            ],
            a,
        )
        for q, a in zip(packed.predict_idx.tolist(), packed.action_ids.tolist())
    ]


def wanted(prompts, actions):
    return [
        (list(zip(p + a[:k], range(len(p) + k))), a[k])
        for p, a in zip(prompts, actions)
        for k in range(len(a))
    ]


def test_picture_in_header_is_what_the_code_draws():
    """The header is the first thing a reader trusts."""
    picture = draw(*example())
    assert "\n".join(line.strip() for line in picture.splitlines()) in "\n".join(
        line.strip() for line in pack_file.__doc__.splitlines()
    )


@pytest.mark.parametrize("share", ["q", None, 0])
def test_every_action_token_has_its_state(share):
    """Eq. 3 by brute force. Would catch positions that do not restart, blocks that leak, a q that later
    blocks do not see (position_ids alone make transformers do so), and rows in depth-first instead of call
    order."""
    prompts, actions, prefix = random_calls()
    for p, a, s in ((prompts, actions, prefix if share == "q" else share), (*deep_calls(), None)):
        packed = pack(p, a, s)
        assert states(packed) == wanted(p, a)
        assert packed.call_idx.tolist() == [c for c, x in enumerate(a) for _ in x]
        assert packed.input_ids[packed.action_idx].tolist() == packed.action_ids.tolist()
        verify(packed, p, a)


def test_share_q_is_equation_4():
    """share = |q| for one task is [q, x_0, a_0, x_1, a_1, ...] to the letter, a kept response standing twice,
    as action and as context, and only the action in m_act (Eq. 6: masks by role would add the copies)."""
    q, prompts, actions = [1, 2], [[1, 2], [1, 2, 7, 8, 5], [1, 2, 7, 9, 5]], [[7, 8], [7, 9], [7]]
    packed = pack(prompts, actions, share=2)
    assert packed.input_ids.tolist() == q + [7, 8] + [7, 8, 5, 7, 9] + [7, 9, 5, 7]
    assert packed.position_ids.tolist() == [0, 1] + [2, 3] + [2, 3, 4, 5, 6] + [2, 3, 4, 5]
    assert packed.action_mask.nonzero()[:, 0].tolist() == [2, 3, 7, 8, 12]
    assert packed.action_mask.sum() == sum(map(len, actions))


def test_tree_shares_every_prefix_and_keeps_every_decision():
    """An append-only agent is one chain; two calls that sampled the same token in the same state share a node
    and stay two decisions."""
    packed = pack([[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5, 6]], [[3], [5], [7, 8]])
    assert packed.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8] and packed.position_ids.tolist() == list(
        range(8)
    )
    twice = pack([[1, 2], [1, 2]], [[3, 4], [3, 5]])
    assert twice.input_ids.tolist() == [1, 2, 3, 4, 5] and twice.action_ids.tolist() == [3, 4, 3, 5]
    assert (
        twice.predict_idx.tolist() == [1, 2, 1, 2]
        and twice.action_mask.sum() == 3
        and twice.call_idx.tolist() == [0, 0, 1, 1]
    )


def test_one_row_predicts_several_first_tokens():
    """q = 1 2 3 and two calls with empty x that start 7 and 9: the row of 3 predicts both, and its gradient
    is the sum. Would catch labels by position."""
    model = tiny()
    packed = pack([[1, 2, 3], [1, 2, 3]], [[7], [9]], share=3)
    assert packed.predict_idx.tolist() == [2, 2] and packed.action_ids.tolist() == [7, 9]
    hidden = action_hidden(model, packed)
    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits[0, -1]
    torch.testing.assert_close(hidden @ model.lm_head.weight.T, logits.expand(2, -1), rtol=1e-4, atol=1e-4)


def test_history_has_one_growing_context_and_the_same_rows():
    """[q, a_0, o_0, a_1, o_1] causal with running positions, (N,) in the order of `pack` of the calls."""
    prefixes, actions, observations = (
        [[1, 2], [1, 3]],
        [[[4, 5], [6]], [[7], [8, 9]]],
        [[[10], []], [[11, 12], [13]]],
    )
    packed = pack_history(prefixes, actions, observations)
    histories = [[1, 2, 4, 5, 10, 6], [1, 3, 7, 11, 12, 8, 9]]
    expected = [
        (histories[t][:n], a)
        for t, n, a in ((0, 2, 4), (0, 3, 5), (0, 5, 6), (1, 2, 7), (1, 5, 8), (1, 6, 9))
    ]
    assert [([i for i, _ in state], a) for state, a in states(packed)] == expected
    assert all([p for _, p in state] == list(range(len(state))) for state, _ in states(packed))
    assert packed.call_idx.tolist() == [0, 0, 1, 2, 3, 3] and packed.action_ids.tolist() == [4, 5, 6, 7, 8, 9]


@pytest.mark.parametrize("seed", range(8))
def test_block_mask_is_create_block_mask(seed):
    """The analytic BlockMask in all four index sets, partial and full, rows and columns, on random trees with
    padding. Full tiles need long runs without a branch, so some calls are long."""
    rng = random.Random(seed)
    q = random_ids(rng, 1, 400)
    prompts = [q + random_ids(rng, 0, 300 if seed % 2 else 20) for _ in range(rng.randint(1, 9))]
    packed = pack(
        prompts,
        [random_ids(rng, 1, 90) for _ in prompts],
        share=rng.choice([None, len(q)]),
        pad_to=BLOCK * rng.choice([1, 4]),
    )
    S, end = len(packed.input_ids), packed.subtree_end
    ours = packed.block_mask
    reference = create_block_mask(lambda b, h, q, k: (k <= q) & (q < end[k]), None, None, S, S, device="cpu")
    assert ours.shape == reference.shape and S % BLOCK == 0
    for kind in ("kv", "full_kv", "q", "full_q"):
        count, expected = (
            getattr(ours, f"{kind}_num_blocks")[0, 0],
            getattr(reference, f"{kind}_num_blocks")[0, 0],
        )
        assert count.tolist() == expected.tolist(), kind
        for row, n in enumerate(count.tolist()):
            assert (
                getattr(ours, f"{kind}_indices")[0, 0, row, :n].tolist()
                == getattr(reference, f"{kind}_indices")[0, 0, row, :n].tolist()
            )
    if seed % 2:
        assert ours.full_kv_num_blocks.sum() > 0 and ours.kv_num_blocks.sum() > 0


@pytest.mark.parametrize("kind", ["qwen2", "llama"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_three_attentions_agree(kind):
    """FlexAttention (forward: it has no backward on a CPU), segments and the dense mask; with more heads than
    key-value heads."""
    model = tiny(kind)
    for prompts, actions in (random_calls()[:2], deep_calls()):
        packed = pack(prompts, actions, pad_to=3)
        with torch.no_grad():
            dense = action_hidden(model, packed, "dense")
            torch.testing.assert_close(action_hidden(model, packed, "segments"), dense, rtol=0, atol=2e-5)
            torch.testing.assert_close(action_hidden(model, packed, "flex"), dense, rtol=0, atol=2e-5)


def test_benchmark_compares_equal_computations(monkeypatch):
    """Each row: the token counts of its packs, the logits of single calls, and all forms timed. `work` by hand: a token
    costs the layers' weights and twice the width for each token that it sees, an action token the head."""
    shape = (5, 3, 1, False, 10)
    monkeypatch.setattr(pack_file, "BENCH", {"small": shape, "append": (5, 3, 1, True, 10)})
    model = tiny(vocab_size=1000)
    _, _, *rows = pack_file.bench(model, rounds=2)
    prompts, actions, prefix = pack_file.bench_calls(*shape)
    alone, S = sum(map(len, prompts + actions)), len(pack(prompts, actions, prefix).input_ids)
    cells = [c.strip() for c in rows[0].split("|")]
    assert len(rows) == 4 and cells[2:4] == ["q", f"{alone} -> {S}"] and S == alone - 2 * 5
    assert all(float(row.split("|")[-2]) < 1e-4 for row in rows)
    assert (
        float(rows[3].split("|")[4]) > 1.5 > float(rows[2].split("|")[4])
    )  # append-only: only the tree shares
    packed = pack([[1, 2]], [[3]])
    weights = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    assert pack_file.bench_work(model, packed) == 3 * weights + (1 + 2 + 3) * 2 * 2 * 32 + 1000 * 32


def test_segments_and_dense_have_the_same_gradients():
    prompts, actions, _ = random_calls()
    grads = []
    for backend in ("dense", "segments"):
        model = tiny().double()
        (action_hidden(model, pack(prompts, actions), backend) ** 2).sum().backward()
        grads.append([p.grad for p in model.parameters() if p.grad is not None])
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_blocks_do_not_leak():
    """Change a token of one block: the other blocks' hidden states do not move by a bit."""
    model, prompts, actions = tiny(), [[1, 2, 3], [1, 2, 4, 5]], [[6, 7], [8, 9]]
    with torch.no_grad():
        before = action_hidden(model, pack(prompts, actions, share=2))
        after = action_hidden(model, pack([[1, 2, 30], prompts[1]], actions, share=2))
    assert torch.equal(before[2:], after[2:]) and not torch.equal(before[:2], after[:2])


def test_gradient_checkpointing_carries_the_pack():
    prompts, actions, _ = random_calls()
    grads = []
    for checkpointing in (False, True):
        model = tiny().train()
        if checkpointing:
            enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)
            enable({"use_reentrant": False})
        (action_hidden(model, pack(prompts, actions)) ** 2).sum().backward()
        grads.append(model.model.layers[0].mlp.up_proj.weight.grad)
    torch.testing.assert_close(*grads)


def test_masks_made_in_inference_mode_can_be_trained_through_afterwards():
    """A mask that scoring made and kept must not poison the update."""
    model, (prompts, actions, _) = tiny(), random_calls()
    packed = pack(prompts, actions, pad_to=BLOCK)
    with torch.inference_mode():
        action_hidden(model, packed), action_hidden(model, packed, "dense"), packed.block_mask
    for backend in ("segments", "dense"):
        action_hidden(model, packed, backend).sum().backward()
    assert not any(mask.is_inference() for _, mask in packed.segments[1] if mask is not None)
    assert not packed.block_mask.kv_indices.is_inference()


def test_without_a_pack_the_attention_is_sdpa():
    """Left-padded batches keep their mask: an attention registered without a mask function loses it
    silently."""
    ours, sdpa = tiny(), tiny(attention="sdpa")
    ids, mask = torch.tensor([[0, 0, 5, 6], [3, 4, 5, 6]]), torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]])
    with torch.no_grad():
        a, b = (m(input_ids=ids, attention_mask=mask).logits for m in (ours, sdpa))
        alone = ours(input_ids=torch.tensor([[5, 6]])).logits
    assert torch.equal(a, b)
    torch.testing.assert_close(a[0, 2:], alone[0], rtol=0, atol=1e-4)


def test_a_model_that_drops_the_pack_is_refused():
    """Else its tokens would all see each other, without a word."""
    with pytest.raises(ValueError, match="was not handed the pack"):
        tiny().base_model(
            input_ids=torch.tensor([[1, 2, 3]]),
            attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
            use_cache=False,
        )


def test_padding_sees_itself_only():
    packed = pack([[1, 2]], [[3]], pad_to=5)
    assert packed.input_ids.tolist() == [1, 2, 3, 0, 0] and packed.subtree_end.tolist() == [3, 3, 3, 4, 5]
    assert pad(packed, 4) is packed


def test_buckets_are_few_and_tight():
    sizes = [bucket(n) for n in range(1, 20000)]
    assert all(b >= n and b % BLOCK == 0 for n, b in enumerate(sizes, 1))
    assert all(b <= 1.25 * n for n, b in enumerate(sizes, 1) if n > 1024) and len(set(sizes)) < 32


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
    """Nothing is cut: a limit that would remove a conditioning or sampled token is an error that names the
    call."""
    with pytest.raises(ValueError, match=message):
        pack(*args)


@pytest.mark.parametrize("share", ["q", None])
def test_split_keeps_order_and_budget(share):
    """Every call once, in order, and no pack over the budget, also where calls have sampled the same tokens
    that only a tree shares."""
    prompts, actions, prefix = random_calls(tasks=6, calls=5)
    prompts, actions, prefix = [x[:1] * 6 + x for x in (prompts, actions, prefix)]
    limits = prefix if share == "q" else [None] * len(prompts)
    runs = split(prompts, actions, 60, limits)
    assert [c for run in runs for c in range(run.start, run.stop)] == list(range(36)) and len(runs) > 2
    assert all(len(pack(prompts[run], actions[run], limits[run]).input_ids) <= 60 for run in runs)
    with pytest.raises(ValueError, match="call 0 has .* over the max_tokens = 3"):
        split(prompts, actions, 3)


def agent_calls(tasks, seed=0):
    """Calls with the lengths of a compact-memory search agent: a protocol of 250 tokens, questions of 30 to 80, two to
    six calls, whose contexts have 250 to 650 tokens and whose responses have 60 to 250."""
    rng = random.Random(seed)
    ids = lambda low, high: [rng.randrange(V) for _ in range(rng.randint(low, high))]
    protocol, prompts, actions = ids(250, 250), [], []
    for _ in range(tasks):
        q = protocol + ids(30, 80)
        for t in range(rng.randint(2, 6)):
            prompts.append(q + (ids(250, 650) if t else []))
            actions.append(ids(60, 250))
    return prompts, actions


@pytest.mark.parametrize("max_tokens", [8192, 16384])
def test_split_fills_packs_and_cuts_between_tasks(max_tokens):
    """At least 85 % full, all but the last; and of all cuts that fill a pack so, none parts calls that share less.
    Would catch a cut at the first overflow, whose packs read q again, and one that leaves packs half empty."""
    prompts, actions = agent_calls(64)
    runs = split(prompts, actions, max_tokens)
    sizes = [len(pack(prompts[run], actions[run]).input_ids) for run in runs]
    assert len(runs) > 4 and max(sizes) <= max_tokens and min(sizes[:-1]) >= 0.85 * max_tokens
    assert [c for run in runs for c in range(run.start, run.stop)] == list(range(len(prompts)))
    shared = lambda c: len(os.path.commonprefix([prompts[c - 1] + actions[c - 1], prompts[c] + actions[c]]))
    for run in runs[:-1]:
        others = {
            c: len(pack(prompts[run.start : c], actions[run.start : c]).input_ids)
            for c in range(run.stop - 5, run.stop + 9)
        }
        assert shared(run.stop) == min(
            shared(c) for c, S in others.items() if 0.85 * max_tokens <= S <= max_tokens
        )


@pytest.mark.parametrize("share", [[10, 0], [0, 10], [0, None], [None, 0]])
def test_split_counts_what_both_calls_share(share):
    """Ten tokens in common of which one call shares none: the two need 22 tokens, not 12."""
    prompts, actions = [[1] * 10, [1] * 10], [[2], [3]]
    assert len(pack(prompts, actions, share).input_ids) == 22
    assert len(split(prompts, actions, 21, share)) == 2 and len(split(prompts, actions, 22, share)) == 1


def test_split_cuts_one_huge_task_between_its_calls():
    prompts, actions = [[1, 2, 3] + [4] * t for t in range(40)], [[5, 6]] * 40
    runs = split(prompts, actions, 60, [3] * 40)
    assert len(runs) > 3 and all(len(pack(prompts[r], actions[r], [3] * 40).input_ids) <= 60 for r in runs)
    with pytest.raises(ValueError, match="call 3 has 8 tokens, over the max_tokens = 7"):
        split(prompts, actions, 7, 3)


def bump(packed, name, i, by=1):
    x = getattr(packed, name).clone()
    x[i] += by
    return replace(packed, **{name: x})


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
    """One unit off in any place of any field, up or down, is found and named (no call reads a padding token,
    so there is none)."""
    prompts, actions, prefix = random_calls(tasks=2, calls=3)
    for share in (prefix, None):
        packed = pack(prompts, actions, share)
        for i in range(len(getattr(packed, name))):
            for by in (1, -1):
                with pytest.raises(ValueError, match=message):
                    verify(bump(packed, name, i, by), prompts, actions)


def test_verify_sees_swapped_calls():
    packed = pack([[1, 2], [1, 2, 3]], [[4], [5]])
    with pytest.raises(ValueError, match="call 0"):
        verify(packed, [[1, 2, 3], [1, 2]], [[5], [4]])


SMALL = {k: v for k, v in SHAPE.items() if k != "initializer_range"}


@pytest.mark.parametrize(
    "config, message",
    [
        (MistralConfig(**SMALL, sliding_window=8), "sliding-window"),
        (
            Qwen2Config(**SMALL, use_sliding_window=True, sliding_window=8, max_window_layers=0),
            "sliding-window",
        ),
        (Gemma2Config(**SMALL, head_dim=8, layer_types=["full_attention"] * 2), "softcap"),
        (GptOssConfig(**SMALL, head_dim=8, num_local_experts=2, layer_types=["full_attention"] * 2), "sinks"),
        (
            LlamaConfig(
                **SMALL, rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
            ),
            "rotary",
        ),
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
    encoder = BertLMHeadModel(
        BertConfig(
            vocab_size=V,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            is_decoder=False,
        )
    )
    encoder.config._attn_implementation = "packed"
    with pytest.raises(ValueError, match="encoder"):
        check_model(encoder.eval())
