"""The environment: scores by hand, hostile queries, the protocol, the toy."""

import gzip
import io
import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from contextlib import contextmanager
from threading import Thread
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest

import env as env_file
from env import (
    PROTOCOL,
    HttpRetriever,
    Passage,
    SearchEnv,
    SqliteRetriever,
    Task,
    ToyWiki,
    build_index,
    compose,
    exact_match,
    load_passages,
    load_questions,
    normalize,
    open_retriever,
    recall,
    serve,
    step_all,
    token_f1,
    toy_envs,
)

# prediction, aliases, then EM and F1 of SQuAD, HotpotQA and MEM1, worked out by hand from each definition
SCORES = [
    ("Paris", ("Paris",), (1, 1), (1, 1), (1, 1)),
    ("paris.", ("Paris",), (1, 1), (1, 1), (1, 1)),
    ("The  Paris", ("paris",), (1, 1), (1, 1), (0, 2 / 3)),  # MEM1 keeps articles
    ("Paris", ("Rome",), (0, 0), (0, 0), (0, 0)),
    ("in Paris", ("Paris",), (0, 2 / 3), (0, 2 / 3), (0, 2 / 3)),
    ("a b c", ("b c d",), (0, 4 / 5), (0, 4 / 5), (0, 2 / 3)),  # "a" is an article
    ("b b", ("b",), (0, 2 / 3), (0, 2 / 3), (0, 1)),  # MEM1 counts sets
    ("b", ("b b",), (0, 2 / 3), (0, 2 / 3), (0, 1)),
    ("b b c", ("b c c",), (0, 2 / 3), (0, 2 / 3), (0, 1)),
    ("U.S.", ("US",), (1, 1), (1, 1), (0, 0)),  # MEM1: "u s"
    ("U.S.", ("U.S",), (1, 1), (1, 1), (1, 1)),
    ("New York", ("NYC", "New York City"), (0, 4 / 5), (0, 4 / 5), (0, 4 / 5)),
    ("New York City", ("NYC", "New York City"), (1, 1), (1, 1), (1, 1)),
    ("", ("x",), (0, 0), (0, 0), (0, 0)),
    ("", ("the",), (1, 1), (1, 0), (0, 0)),  # HotpotQA: no token in common is 0
    ("the", ("x",), (0, 0), (0, 0), (0, 0)),
    ("yes", ("yes",), (1, 1), (1, 1), (1, 1)),
    ("Yes.", ("yes",), (1, 1), (1, 1), (1, 1)),
    ("yes it is", ("yes",), (0, 1 / 2), (0, 0), (0, 1 / 2)),  # HotpotQA: yes and no match only themselves
    ("yes", ("yes it is",), (0, 1 / 2), (0, 0), (0, 1 / 2)),
    ("no", ("yes",), (0, 0), (0, 0), (0, 0)),
    ("no way", ("no way out",), (0, 4 / 5), (0, 4 / 5), (0, 4 / 5)),
    ("noanswer", ("noanswer here",), (0, 2 / 3), (0, 0), (0, 2 / 3)),
    ("Zürich", ("zürich",), (1, 1), (1, 1), (1, 1)),
    ("Zurich", ("Zürich",), (0, 0), (0, 0), (0, 0)),
    ("ÉCLAIR", ("éclair",), (1, 1), (1, 1), (1, 1)),
    ("東京", ("東京",), (1, 1), (1, 1), (1, 1)),
    ("東京 都", ("東京",), (0, 2 / 3), (0, 2 / 3), (0, 2 / 3)),
    ("theatre", ("atre",), (0, 0), (0, 0), (0, 0)),
    ("glass maker", ("glass trader",), (0, 1 / 2), (0, 1 / 2), (0, 1 / 2)),
    ("rock-n-roll", ("rock n roll",), (0, 0), (0, 0), (1, 1)),
    ("rock'n'roll", ("rocknroll",), (1, 1), (1, 1), (0, 0)),
    ("don't", ("dont",), (1, 1), (1, 1), (0, 0)),
    ("an apple a day", ("apple day",), (1, 1), (1, 1), (0, 2 / 3)),
    ("a", ("b", "a"), (1, 1), (1, 0), (1, 1)),  # a SQuAD answer that is an article is empty, and equal
    ("1,000", ("1000",), (1, 1), (1, 1), (0, 0)),
    ("3.14", ("3 14",), (0, 0), (0, 0), (1, 1)),
    ("May 18 2018", ("May 18, 2018",), (1, 1), (1, 1), (1, 1)),
    ("18 May 2018", ("May 18, 2018",), (0, 1), (0, 1), (0, 1)),
    ("hit points", ("hit points or health points",), (0, 4 / 7), (0, 4 / 7), (0, 2 / 3)),
    ("Barack Obama", ("Obama", "Barack H. Obama"), (0, 4 / 5), (0, 4 / 5), (0, 4 / 5)),
    ("  \t Paris\n", ("Paris",), (1, 1), (1, 1), (1, 1)),
    ("“Paris”", ("Paris",), (0, 0), (0, 0), (0, 0)),  # typographic quotes are no ASCII punctuation
    ("Paris ; Rome", ("Paris Rome",), (1, 1), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("prediction, answers, squad, hotpotqa, mem1", SCORES)
def test_scores(prediction, answers, squad, hotpotqa, mem1):
    for rule, (em, f1) in (("squad", squad), ("hotpotqa", hotpotqa), ("mem1", mem1)):
        assert exact_match(prediction, answers, rule) == em, rule
        assert token_f1(prediction, answers, rule) == pytest.approx(f1), rule


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


def hostile(n, seed=0):
    """Strings of FTS5 operators, tags, control characters, any Unicode; one of 100 kB."""
    rng, tags = random.Random(seed), "<search> </search> <answer> </answer> </information>"
    pieces = [*"\"'*^():-+{};\0\n", *f"NEAR AND OR NOT alpha title: {tags}".split()]
    for _ in range(n - 1):
        yield "".join(
            rng.choice((rng.choice(pieces), " ", chr(rng.randrange(0x110000))))
            for _ in range(rng.randrange(40))
        )
    yield "<search> " + "alpha ( " * 12_500 + "</search>"


def test_hostile_text_as_queries_and_responses():
    """2,000 strings each: no exception, no operator taken for one, the index as it was, and no answer from a response
    that has none."""
    passages = [Passage("T", "alpha beta"), Passage("U", "gamma")]
    retriever = SqliteRetriever(passages)
    for text in hostile(2000):
        assert all(p in passages for p in retriever.search([text], 2)[0])
    for text in hostile(2000, seed=1):
        env = SearchEnv(Task("t", ("q",), (("x",),)), retriever)
        observation, reward, done = env.step(text)
        assert reward == 0 and done == (observation == "")
        assert done or observation.rstrip().endswith("</information>")
    assert retriever.search(["alpha gamma"], 3) == [passages[::-1]]


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


GOOD = '{"id": "a", "question": "who ?", "golden_answers": ["x", "y"]}\n'


def test_questions_in_every_format(tmp_path):
    """FlashRAG's lines, plain and packed, and HotpotQA's own JSON; a `;` would join two questions."""
    (tmp_path / "q.jsonl").write_text(
        GOOD + '{"id": 1, "question": " a; b? ", "golden_answers": ["the", "z"]}\n'
    )
    tasks = load_questions(tmp_path / "q.jsonl")
    assert tasks == [Task("a", ("who ?",), (("x", "y"),)), Task("1", ("a, b?",), (("z",),))]
    with gzip.open(tmp_path / "q.jsonl.gz", "wt") as f:
        f.write(GOOD)
    assert load_questions(tmp_path / "q.jsonl.gz") == tasks[:1]
    (tmp_path / "h.json").write_text(
        json.dumps([{"_id": "h", "question": "q", "answer": "yes", "context": []}])
    )
    assert load_questions(tmp_path / "h.json") == [Task("h", ("q",), (("yes",),))]


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "line 2: not a JSON record"),
        ("[]", "line 2: not a JSON record"),
        ('{"id": "b", "question": "q"}', "line 2: no question"),
        ('{"id": "b", "question": "q", "golden_answers": "x"}', "line 2: the answers must be a list"),
        ('{"id": "b", "question": "q", "golden_answers": []}', "line 2: the answers"),
        ('{"id": "b", "question": "q", "golden_answers": ["the"]}', "line 2: the answers"),
        ('{"id": "b", "question": "q", "golden_answers": [7]}', "line 2: the answers"),
        ('{"id": "b", "question": "", "golden_answers": ["x"]}', "line 2: the question is ''"),
        ('{"id": "a", "question": "q", "golden_answers": ["x"]}', "line 2: id 'a' is that of number 1 too"),
    ],
)
def test_a_question_that_is_none_is_refused_by_line(tmp_path, line, message):
    (tmp_path / "q.jsonl").write_text(GOOD + line + "\n")
    with pytest.raises(ValueError, match=message):
        load_questions(tmp_path / "q.jsonl")


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        load_questions(tmp_path / "q.parquet")


def test_compose_uses_every_question_once():
    """Seeded, k at a time, over all sources; what is left over is fewer than k."""
    questions = [Task(str(i), (f"q{i}",), ((str(i),),)) for i in range(20)]
    tasks = compose(questions, 3, seed=1)
    used = [q for task in tasks for q in task.questions]
    assert (
        len(tasks) == len({task.id for task in tasks}) == 6
        and len(set(used)) == 18
        and tasks == compose(questions, 3, seed=1)
    )
    assert used != [q for task in compose(questions, 3, seed=2) for q in task.questions]
    assert all(q == f"q{a[0]}" for task in tasks for q, a in zip(task.questions, task.answers))
    with pytest.raises(ValueError, match="20 questions make no task of 21"):
        compose(questions, 21)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_index_on_disk(tmp_path, suffix):
    """Whole or not at all: the same answers as in memory, read-only, never over an old one, and what a killed build
    left is no index. The outer quotes of a title go; inner ones and the rest of the text stay."""
    corpus, index = tmp_path / f"c.jsonl{suffix}", tmp_path / "it's an %20index?.db"
    records = [{"id": "0", "contents": '""Hey" he said"\nfirst "x"\nsecond'}, {"title": "T", "text": "alpha"}]
    with (gzip.open if suffix else open)(corpus, "wt") as f:
        f.writelines(json.dumps(r) + "\n" for r in records)
    passages = [Passage('"Hey" he said', 'first "x"\nsecond'), Passage("T", "alpha")]
    assert list(load_passages(corpus)) == passages
    (tmp_path / f"{index.name}.part").write_bytes(b"half an index")
    with pytest.raises(ValueError, match="no index there"):
        SqliteRetriever(index=index)
    build_index(corpus, index)
    retriever = SqliteRetriever(index=index)
    assert retriever.search(["hey alpha"], 5) == SqliteRetriever(passages).search(["hey alpha"], 5)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([corpus.name, index.name])
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        retriever.db.execute("DELETE FROM passage")
    with pytest.raises(ValueError, match="exists already"):
        build_index(corpus, index)
    with pytest.raises(ValueError, match="no index of this program"):
        SqliteRetriever(index=corpus)
    corpus.write_bytes(gzip.compress(b'{"id": "1"}\n') if suffix else b'{"id": "1"}\n')
    with pytest.raises(ValueError, match="line 1: a passage needs"):
        build_index(corpus, tmp_path / "other.db")
    assert not (tmp_path / "other.db").exists()


def test_a_killed_build_leaves_no_index(tmp_path):
    """SIGKILL in the middle: no file under the index's name; the next build works."""
    corpus, index = tmp_path / "c.jsonl", tmp_path / "i.db"
    corpus.write_text(
        "".join(json.dumps({"contents": f"t{i}\n" + "word " * 40}) + "\n" for i in range(60_000))
    )
    build = subprocess.Popen(
        [sys.executable, env_file.__file__, "index", str(corpus), str(index)], stderr=subprocess.DEVNULL
    )
    while build.poll() is None and not os.path.exists(f"{index}.part"):
        time.sleep(0.01)
    time.sleep(0.2)
    build.kill()
    build.wait()
    assert not index.exists() and os.path.exists(f"{index}.part")
    corpus.write_text(json.dumps({"contents": "t\nalpha"}) + "\n")
    build_index(corpus, index)
    assert SqliteRetriever(index=index).search(["alpha"], 1) == [[Passage("t", "alpha")]]


def test_common_words_cost_nothing_and_rare_ones_decide(monkeypatch):
    """Words are taken from the rarest on until they reach POSTINGS; one always counts; accents and case fold as in the
    index; in a small corpus all words count, as plain BM25 has it."""
    passages = [
        Passage(f"t{i}", "the common" + (" rare" if i == 7 else "") + (" Émile" if i % 5 == 0 else ""))
        for i in range(50)
    ]
    retriever = SqliteRetriever(passages)
    words = ["the", "EMILE", "rare", "absent", "common"]
    assert set(retriever._rarest(words)) == set(words)
    monkeypatch.setattr(SqliteRetriever, "POSTINGS", 20)
    assert retriever._rarest(words) == ["absent", "rare", "EMILE"] and retriever._rarest(["the"]) == ["the"]
    assert retriever.search(["the rare emile"], 1)[0][0] == passages[7]


@contextmanager
def serving(retriever, port=0):
    with serve(retriever, port) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()


def test_server_and_client_are_the_index_itself():
    """Batched, any text, fewer hits than asked; with scores and without."""
    retriever = SqliteRetriever([Passage('a "quoted" title', "alpha\nbeta"), Passage("", "gamma alpha")])
    with serving(retriever) as url:
        client = HttpRetriever(url)
        for queries in (["alpha", "nothing at all", "gamma"], ["alpha", "gamma"], ['") OR', "\0"], []):
            assert client.search(queries, 3) == retriever.search(queries, 3)
        bare = json.load(urlopen(Request(url, json.dumps({"queries": ["gamma"], "topk": None}).encode())))
        assert bare == {"result": [[{"contents": '""\ngamma alpha'}]]}
        with pytest.raises(ConnectionError, match="/x refused the request with status 400"):
            HttpRetriever(url.replace("/retrieve", "/x")).search(["a"], 1)


@pytest.mark.parametrize(
    "answer, expected",
    [
        ({"result": [[{"document": {"contents": '"T"\nx'}, "score": 1.0}]]}, [[Passage("T", "x")]]),
        ({"result": [[{"contents": "T\nx y\nz"}]]}, [[Passage("T", "x y\nz")]]),
        ({"result": [[{"document": {"title": "T", "text": "x", "contents": "?"}}]]}, [[Passage("T", "x")]]),
        ({"result": [[{"document": {"text": "x"}}] * 9]}, [[Passage("", "x")] * 3]),
        ({"result": [[]]}, [[]]),
        ({"result": []}, "0 results for 1 queries"),
        ({"result": [[{"document": {"content": "T\nx"}}]]}, "needs `contents`"),
        ({"results": [[]]}, "'result'"),
        ([], "did not answer as a retrieval server does"),
        ({"detail": "Internal Server Error"}, "Internal Server Error"),
    ],
)
def test_answers_of_other_servers(answer, expected, monkeypatch):
    """Every form that Search-R1's servers send; anything else is an error that shows it, never an empty answer."""
    monkeypatch.setattr(env_file, "urlopen", lambda request, timeout: io.BytesIO(json.dumps(answer).encode()))
    client = HttpRetriever("http://there/retrieve")
    if isinstance(expected, list):
        assert client.search(["q"], 3) == expected
    else:
        with pytest.raises(ConnectionError, match=f"http://there/retrieve .*{expected}"):
            client.search(["q"], 3)


@pytest.mark.parametrize(
    "problem",
    [b"<html>", b"", b'{"result": [[', HTTPError("u", 503, "", {}, io.BytesIO(b"busy")), TimeoutError()],
)
def test_what_fails_is_tried_again(problem, monkeypatch):
    """A page that is no JSON, nothing, half an answer, a busy server, silence: again, with growing waits; then an error
    with the URL and what came back."""
    waits, tries = [], []

    def answer(request, timeout):
        tries.append(request)
        assert json.loads(request.data) == {"queries": ["q"], "topk": 1, "return_scores": True}
        if isinstance(problem, Exception):
            raise problem
        return io.BytesIO(problem if len(tries) < 3 or always else b'{"result": [[]]}')

    monkeypatch.setattr(env_file, "urlopen", answer)
    monkeypatch.setattr(env_file.time, "sleep", waits.append)
    always = isinstance(problem, Exception)
    if not always:
        assert HttpRetriever("http://there").search(["q"], 1) == [[]] and waits == [0.5, 1.0]
    always = True
    tries.clear(), waits.clear()
    with pytest.raises(ConnectionError, match="http://there did not answer in 4 tries; the last brought"):
        HttpRetriever("http://there", retries=3).search(["q"], 1)
    assert waits == [0.5, 1.0, 2.0]


def test_many_clients_lose_nothing():
    """16 at once, 50 queries each, over loopback."""
    retriever = SqliteRetriever(ToyWiki(0).passages)
    queries = [f"home of {p.title}" for p in ToyWiki(0).passages[:50]]
    expected, found = retriever.search(queries, 2), {}
    with serving(retriever) as url:

        def ask(n):
            client = HttpRetriever(url)
            found[n] = [client.search([q], 2)[0] for q in queries]

        threads = [Thread(target=ask, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(16), expected)


def test_a_server_that_is_killed_and_comes_back(tmp_path):
    """In the middle of a run: the client waits for it and goes on; where it does not come back, an error, and no empty
    passages."""
    corpus, index = tmp_path / "c.jsonl", tmp_path / "i.db"
    corpus.write_text(json.dumps({"contents": "t\nalpha"}) + "\n")
    build_index(corpus, index)

    def start(port):
        args = [sys.executable, env_file.__file__, "serve", str(index), "--port", str(port)]
        server = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
        return server, server.stdout.readline().strip()

    server, url = start(0)
    client, found = HttpRetriever(url, wait=0.2), []
    found += client.search(["alpha"], 1)
    server.kill()
    server.wait()
    waiting = Thread(target=lambda: found.extend(client.search(["alpha"], 1)))
    waiting.start()
    time.sleep(0.3)
    server, _ = start(url.split(":")[2].split("/")[0])
    waiting.join()
    assert found == [[Passage("t", "alpha")]] * 2
    server.kill()
    server.wait()
    with pytest.raises(ConnectionError, match="did not answer in 2 tries"):
        HttpRetriever(url, retries=1, wait=0.01).search(["alpha"], 1)


def test_observation_budget_cuts_between_passages():
    """Whole passages, the last left out first; the tag is always closed; never silently empty."""
    passages = [Passage("A", "one two"), Passage("B", "three four five"), Passage("C", "six")]
    env = SearchEnv(Task("t", ("q",), (("x",),)), None, budget=17)
    assert env.observe(passages) == "\n<information> [ 4 turns left ] ( A ) one two </information>\n"
    full = SearchEnv(Task("t", ("q",), (("x",),)), None).observe(passages)
    assert "three four five ( C ) six </information>" in full
    env.budget = len(full.split())
    assert env.observe(passages) == full
    env.budget = 3
    assert "what was found is too long </information>" in env.observe(passages)
    assert "nothing found </information>" in env.observe([])
    letters = SearchEnv(Task("t", ("q",), (("x",),)), None, budget=len(full) - 1, length=len)
    assert "five </information>" in letters.observe(passages)


@pytest.mark.parametrize(
    "args, message",
    [
        (["index", "nothing.jsonl", "i.db"], "nothing.jsonl"),
        (["serve", "nothing.db"], "no index there"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_command_line_errors(args, message, tmp_path):
    out = subprocess.run(
        [sys.executable, env_file.__file__, *args], cwd=tmp_path, capture_output=True, text=True
    )
    assert out.returncode and message in out.stderr and "Traceback" not in out.stderr


def test_open_retriever(tmp_path):
    (tmp_path / "c.jsonl").write_text(json.dumps({"contents": "t\nalpha"}) + "\n")
    build_index(tmp_path / "c.jsonl", tmp_path / "i.db")
    for name in ("c.jsonl", "i.db"):
        assert open_retriever(str(tmp_path / name)).search(["alpha"], 1) == [[Passage("t", "alpha")]]
    assert isinstance(open_retriever("http://there/retrieve"), HttpRetriever)


def test_recall_by_hand(tmp_path):
    """Two of three named passages are among the first three; a file without supporting facts is refused."""
    retriever = SqliteRetriever(
        [Passage(t, text) for t, text in (("A", "alpha"), ("B", "beta beta"), ("C", "beta"))]
    )
    records = [
        {
            "_id": "1",
            "question": "alpha ?",
            "answer": "x",
            "supporting_facts": [["A", 0], ["A", 2], ["C", 1]],
        },
        {"_id": "2", "question": "beta", "answer": "x", "supporting_facts": [["B", 0]]},
    ]
    (tmp_path / "h.json").write_text(json.dumps(records))
    assert recall(retriever, tmp_path / "h.json").startswith(
        "2 questions: recall@3 66.7%, recall@10 66.7%, p50"
    )
    (tmp_path / "h.json").write_text(json.dumps([{"_id": "1"}]))
    with pytest.raises(ValueError, match="needs HotpotQA's own JSON"):
        recall(retriever, tmp_path / "h.json")
