"""The environment: scores by hand, hostile queries, the protocol, the toy."""

import json
import random
import subprocess
import sys

import pytest

import env as env_file
from env import (
    PROTOCOL,
    Passage,
    SearchEnv,
    SqliteRetriever,
    Task,
    ToyWiki,
    exact_match,
    load_passages,
    load_questions,
    normalize,
    step_all,
    token_f1,
    toy_envs,
)

SCORES = [  # prediction, aliases, EM, F1, each worked out by hand from the definition of SQuAD
    ("Paris", ("Paris",), 1, 1),
    ("paris.", ("Paris",), 1, 1),
    ("The  Paris", ("paris",), 1, 1),
    ("Paris", ("Rome",), 0, 0),
    ("in Paris", ("Paris",), 0, 2 / 3),
    ("a b c", ("b c d",), 0, 0.8),
    ("b b", ("b",), 0, 2 / 3),
    ("b", ("b b",), 0, 2 / 3),
    ("U.S.", ("US",), 1, 1),
    ("New York", ("NYC", "New York City"), 0, 0.8),
    ("", ("x",), 0, 0),
    ("", ("the",), 1, 1),
    ("the", ("x",), 0, 0),
    ("yes it is", ("yes",), 0, 0.5),
    ("Zürich", ("zürich",), 1, 1),
    ("theatre", ("atre",), 0, 0),
    ("glass maker", ("glass trader",), 0, 0.5),
]


@pytest.mark.parametrize("prediction, answers, em, f1", SCORES)
def test_scores(prediction, answers, em, f1):
    assert exact_match(prediction, answers) == em
    assert token_f1(prediction, answers) == pytest.approx(f1)


def test_normalize():
    assert normalize("  The Cat, a  dog & an owl's ") == "cat dog owls"


@pytest.mark.parametrize(
    "query",
    [
        '"',
        "'",
        "AND",
        "OR",
        "NOT x",
        "NEAR(",
        "NEAR(a b, 2)",
        "*",
        "a*",
        ":",
        "title:x",
        "-",
        "^a",
        "a + b",
        "{a b}:c",
        "😀",
        "\0",
        "a\0b",
        "",
        " ",
        "_",
        "\ud800",
        "); DROP TABLE passage; --",
        "x" * 100_000,
        " ".join(map(str, range(50_000))),
        "a̋ ﬁ ß İ ",
        "\n\t\r",
        "？",
        "١٢",
    ],
)
def test_any_text_is_a_legal_query(query):
    """A model writes anything; FTS5 must see none of its operators in it, and the index must survive."""
    retriever = SqliteRetriever([Passage("T", "alpha beta"), Passage("U", "gamma")])
    assert len(retriever.search([query, "alpha"], 3)) == 2
    assert retriever.search(["alpha"], 3) == [[Passage("T", "alpha beta")]]


def test_random_bytes_are_legal_queries():
    rng, retriever = random.Random(0), SqliteRetriever([Passage("T", "alpha beta")])
    for _ in range(500):
        retriever.search(
            [
                "".join(
                    chr(rng.choice((rng.randrange(128), rng.randrange(0x110000))))
                    for _ in range(rng.randrange(30))
                )
            ],
            2,
        )


def test_retrieval_is_bm25_best_first():
    """Rare words weigh more, the title counts, k is a limit, and case and order do not matter."""
    retriever = SqliteRetriever(
        [Passage("A", "river river river"), Passage("B", "river of Guso"), Passage("Guso", "mayor")]
    )
    found = retriever.search(["GUSO river"], 3)[0]
    assert found[0] == Passage("B", "river of Guso") and len(found) == 3
    assert retriever.search(["river", "nothing"], 1) == [[Passage("A", "river river river")], []]


def two_questions(**settings):
    task = Task("t", ("q1", "q2"), (("Rome", "Roma"), ("glass maker",)))
    return SearchEnv(task, SqliteRetriever([Passage("T", "alpha"), Passage("U", "alpha beta")]), **settings)


def test_answers_belong_to_questions_in_order():
    """Split on `;`; a missing one scores 0, one too many is ignored, partial credit counts (EM 0..k)."""
    for answer, em, f1 in (
        ("Roma ; glass maker", 2, 2),
        ("glass maker ; Rome", 0, 0),
        ("Rome", 1, 1),
        ("Rome;;", 1, 1),
        ("", 0, 0),
        (" ; glass trader ; x", 0, 0.5),
    ):
        env = two_questions()
        assert env.step(f"<think> m </think> <answer> {answer} </answer>") == ("", em, True)
        assert env.score() == (em, f1)
    assert two_questions(reward="f1").step("<answer>;glass trader</answer>") == ("", 0.5, True)


@pytest.mark.parametrize(
    "response",
    [
        "",
        "Rome ; glass maker",
        "<answer> Rome",
        "<search> x <answer>",
        "</answer> Rome <answer>",
        "<think></think>",
    ],
)
def test_malformed_response_ends_with_nothing(response):
    """No action, no reward; and nothing outside the response is ever scored (the protocol text itself shows
    answer tags)."""
    env = two_questions()
    assert env.step(response) == ("", 0.0, True) and env.score() == (0, 0)
    assert "<answer>" in PROTOCOL and PROTOCOL in env.prompt() and "q1 ; q2" in env.prompt()


def test_turn_budget_and_hints():
    """Turns grow with the questions and are shown; a search on the last turn is not carried out and ends the
    episode unanswered."""
    env = two_questions()
    assert env.turns_left == 6 and two_questions(turns_per_question=3).turns_left == 8
    hints = []
    for _ in range(5):
        observation, reward, done = env.step("<search> alpha </search>")
        assert (
            not done and reward == 0 and observation.endswith("( T ) alpha ( U ) alpha beta </information>\n")
        )
        hints.append(observation.split("[")[1].split("]")[0].strip())
    assert hints == ["5 turns left", "4 turns left", "3 turns left", "2 turns left", "last turn : answer now"]
    assert env.step("<search> alpha </search>") == ("", 0.0, True)


def test_first_action_wins():
    env = two_questions()
    observation, _, done = env.step("<search> beta </search> <answer> Rome </answer>")
    assert not done and "( U ) alpha beta" in observation and env.score() == (0, 0)
    assert "nothing found" in env.step("<search> zzz </search>")[0]


def test_step_all_is_step_for_each():
    """One batched retrieval, across environments with different retrievers, in the order given."""
    other = SqliteRetriever([Passage("X", "alpha alpha")])

    def fresh():
        envs = [two_questions(), two_questions(), two_questions(), two_questions()]
        envs[2].retriever = other
        return envs

    responses = [
        "<search> alpha </search>",
        "<answer> Rome </answer>",
        "<search> alpha </search>",
        "nonsense",
    ]
    assert step_all(fresh(), responses) == [e.step(r) for e, r in zip(fresh(), responses)]
    assert "( X )" in step_all(fresh(), responses)[2][0]


@pytest.mark.parametrize("questions, answers", [((), ()), (("q",), ()), (("q",), ((),))])
def test_task_refuses(questions, answers):
    with pytest.raises(ValueError, match="task t"):
        Task("t", questions, answers)


@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_expert_solves_every_task_from_its_memory_alone(k):
    """Every fact it needs is retrieved, within the budget; and a copy of the expert that has forgotten all
    but (q, last response, last observation) says the same: the compact state suffices."""
    for env in toy_envs("test", 24, k):
        done, calls = False, 0
        while not done:
            response, calls = ToyWiki.expert(env), calls + 1
            amnesiac = SearchEnv(env.task, env.retriever)
            amnesiac.response, amnesiac.observation = env.response, env.observation
            assert ToyWiki.expert(amnesiac) == response
            _, reward, done = env.step(response)
        assert env.score() == (k, k) and k < calls <= 2 * k + 1


def test_worlds_share_names_and_no_facts():
    """Nothing can be memorised: train and test answer the same question differently."""
    a, b = ToyWiki("train-0-0"), ToyWiki("test-0-0")
    assert a.facts.keys() == b.facts.keys() and len({entity for _, entity in a.facts}) + 40 > 200
    assert sum(a.facts[f] == b.facts[f] for f in a.facts) < 0.05 * len(a.facts)
    assert ToyWiki(3).facts == ToyWiki(3).facts and ToyWiki(3).tasks(5, 2) == ToyWiki(3).tasks(5, 2)


def test_tasks_are_one_and_two_hops_without_repeats():
    tasks = ToyWiki(0).tasks(50, 8)
    hops = [q.count(" of ") for t in tasks for q in t.questions]
    assert set(hops) == {1, 2} and 0.2 < hops.count(2) / len(hops) < 0.6
    assert (
        all(len(set(t.questions)) == len(set(t.answers)) == 8 for t in tasks)
        and len({t.id for t in tasks}) == 50
    )


def test_a_horizon_that_the_toy_cannot_hold_is_an_error_and_no_endless_loop():
    with pytest.raises(ValueError, match="no 200 questions without a name in common"):
        ToyWiki(0).tasks(1, 200)


def test_demo():
    out = subprocess.run([sys.executable, env_file.__file__], capture_output=True, text=True)
    assert out.returncode == 0 and "EM 2, F1 2" in out.stdout


def test_questions_and_passages_from_files(tmp_path):
    """FlashRAG's and wiki-18's lines; the outer quotes of a title go, inner ones and the rest of the text stay."""
    questions, corpus = tmp_path / "q.jsonl", tmp_path / "c.jsonl"
    questions.write_text('{"id": "a", "question": "who ?", "golden_answers": ["x", "y"]}\n')
    (task,) = load_questions(questions)
    assert task == Task("a", ("who ?",), (("x", "y"),))
    corpus.write_text(json.dumps({"id": "0", "contents": '""Hey" he said"\nfirst "x"\nsecond'}) + "\n")
    assert list(load_passages(corpus)) == [Passage('"Hey" he said', 'first "x"\nsecond')]
    corpus.write_text('{"id": "0", "contents": "t"}\n{"id": "1"}\n')
    with pytest.raises(ValueError, match="c.jsonl, line 2: "):
        list(load_passages(corpus))
    questions.write_text("[]\n")
    with pytest.raises(ValueError, match="q.jsonl, line 1: "):
        load_questions(questions)
