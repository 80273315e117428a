"""The environment: scores by hand, hostile queries, the protocol, retrieval, data sets, the toy."""

import gzip
import io
import json
import os
import random
import re
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
    expert_episode,
    load_passages,
    load_questions,
    normalize,
    open_retriever,
    serve,
    split_words,
    token_f1,
    toy_envs,
    toy_texts,
)


def command(*args, **kwargs):
    """`python env.py` with these arguments."""
    return subprocess.run(
        [sys.executable, env_file.__file__, *map(str, args)],
        capture_output=True,
        text=True,
        **kwargs,
    )


def write_lines(path, records):
    """A JSONL file."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


# ---- scores --------------------------------------------------------------------------------------

# prediction, aliases, then (EM, F1) of SQuAD, HotpotQA and MEM1, by hand from each definition
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
    ("yes it is", ("yes",), (0, 1 / 2), (0, 0), (0, 1 / 2)),  # HotpotQA: yes matches only itself
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
    ("a", ("b", "a"), (1, 1), (1, 0), (1, 1)),  # SQuAD: an article alone is empty, and equal
    ("1,000", ("1000",), (1, 1), (1, 1), (0, 0)),
    ("3.14", ("3 14",), (0, 0), (0, 0), (1, 1)),
    ("May 18 2018", ("May 18, 2018",), (1, 1), (1, 1), (1, 1)),
    ("18 May 2018", ("May 18, 2018",), (0, 1), (0, 1), (0, 1)),
    ("hit points", ("hit points or health points",), (0, 4 / 7), (0, 4 / 7), (0, 2 / 3)),
    ("Barack Obama", ("Obama", "Barack H. Obama"), (0, 4 / 5), (0, 4 / 5), (0, 4 / 5)),
    ("  \t Paris\n", ("Paris",), (1, 1), (1, 1), (1, 1)),
    ("“Paris”", ("Paris",), (0, 0), (0, 0), (0, 0)),  # only ASCII punctuation is dropped
    ("Paris ; Rome", ("Paris Rome",), (1, 1), (1, 1), (1, 1)),
]


@pytest.mark.parametrize("prediction, answers, squad, hotpotqa, mem1", SCORES)
def test_scores(prediction, answers, squad, hotpotqa, mem1):
    for rule, (em, f1) in (("squad", squad), ("hotpotqa", hotpotqa), ("mem1", mem1)):
        assert exact_match(prediction, answers, rule) == em, rule
        assert token_f1(prediction, answers, rule) == pytest.approx(f1), rule


def test_normalize():
    assert normalize("  The Cat, a  dog & an owl's ") == "cat dog owls"


# ---- the protocol --------------------------------------------------------------------------------
def two_questions(**settings):
    """A fresh episode: two questions, two passages."""
    task = Task("t", ("q1", "q2"), (("Rome", "Roma"), ("glass maker",)))
    retriever = SqliteRetriever([Passage("T", "alpha"), Passage("U", "alpha beta")])
    return SearchEnv(task, retriever, **settings)


def one_question(retriever=None, **settings):
    return SearchEnv(Task("t", ("q",), (("x",),)), retriever, **settings)


@pytest.mark.parametrize(
    "answer, em, f1",
    [
        ("Roma ; glass maker", 2, 2),
        ("glass maker ; Rome", 0, 0),
        ("Rome", 1, 1),
        ("Rome;;", 1, 1),
        ("", 0, 0),
        (" ; glass trader ; x", 0, 0.5),
    ],
)
def test_answers_belong_to_questions_in_order(answer, em, f1):
    """Split at `;`: a missing answer scores 0, one too many is ignored, and partial credit counts
    (EM 0..k)."""
    response = f"<think> m </think> <answer> {answer} </answer>"
    env = two_questions()
    assert env.step(response) == ("", em, True)
    assert list(env.score().values())[:2] == [em, f1]
    assert two_questions(reward="f1").step(response) == ("", f1, True)


def test_by_mem1s_rule_every_question_needs_an_answer():
    env = two_questions()
    env.step("<answer> Rome </answer>")
    assert env.score() == {"em": 1, "f1": 1, "answered": 1, "solved": 0}
    env.scores = "mem1"
    assert env.score() == {"em": 0, "f1": 0, "answered": 1, "solved": 0}


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
    """No action, no reward. Nothing outside the response is ever scored: the protocol text shows
    answer tags, too."""
    env = two_questions()
    assert env.step(response) == ("", 0.0, True)
    assert env.score()["em"] == env.score()["f1"] == 0
    assert "<answer>" in PROTOCOL
    assert PROTOCOL in env.prompt() and "q1 ; q2" in env.prompt()


def test_turn_budget_and_hints():
    """Turns grow with the questions and are shown. A search on the last turn isn't carried out, and
    ends the episode unanswered."""
    assert one_question().turns_left == 4
    env = two_questions()
    assert env.turns_left == 6
    hints = []
    for _ in range(5):
        observation, reward, done = env.step("<search> alpha </search>")
        assert reward == 0 and not done
        assert observation.endswith("( T ) alpha ( U ) alpha beta </information>\n")
        hints.append(observation.split("[")[1].split("]")[0].strip())
    assert hints[:4] == [f"{n} turns left" for n in (5, 4, 3, 2)]
    assert hints[4] == "last turn : answer now"
    assert env.step("<search> alpha </search>") == ("", 0.0, True)


def test_first_action_wins():
    env = two_questions()
    observation, _, done = env.step("<search> beta </search> <answer> Rome </answer>")
    assert not done and "( U ) alpha beta" in observation
    assert env.score()["em"] == env.score()["f1"] == 0
    assert "nothing found" in env.step("<search> zzz </search>")[0]


def test_step_all_is_step_for_each():
    """One batched retrieval per retriever, across environments, with results in the order given."""
    other = SqliteRetriever([Passage("X", "alpha alpha")])

    def fresh():
        envs = [two_questions() for _ in range(4)]
        envs[2].retriever = other
        return envs

    search = "<search> alpha </search>"
    responses = [search, "<answer> Rome </answer>", search, "nonsense"]
    together = SearchEnv.step_all(fresh(), responses)
    assert together == [env.step(response) for env, response in zip(fresh(), responses)]
    assert "( X )" in together[2][0]


def test_observation_budget_cuts_between_passages():
    """Whole passages, the last left out first; the tag is always closed; never silently empty."""
    passages = [Passage("A", "one two"), Passage("B", "three four five"), Passage("C", "six")]
    env = one_question(budget=17)
    expected = "\n<information> [ 4 turns left ] ( A ) one two </information>\n"
    assert env.observe(passages) == expected
    full = one_question().observe(passages)
    assert "three four five ( C ) six </information>" in full
    env.budget = len(full.split())
    assert env.observe(passages) == full
    env.budget = 3
    assert "what was found is too long </information>" in env.observe(passages)
    assert "nothing found </information>" in env.observe([])
    letters = one_question(budget=len(full) - 1, length=len)
    assert "five </information>" in letters.observe(passages)


@pytest.mark.parametrize("questions, answers", [((), ()), (("q",), ()), (("q",), ((),))])
def test_task_refuses(questions, answers):
    with pytest.raises(ValueError, match="task t"):
        Task("t", questions, answers)


def test_env_refuses_a_reward_that_it_does_not_know():
    with pytest.raises(ValueError, match="'em' or 'f1', not 'EM'"):
        two_questions(reward="EM")


# ---- retrieval -----------------------------------------------------------------------------------
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
    """A model writes anything; FTS5 must see none of its operators in it, and the index must
    survive."""
    retriever = SqliteRetriever([Passage("T", "alpha beta"), Passage("U", "gamma")])
    assert len(retriever.search([query, "alpha"], 3)) == 2
    assert retriever.search(["alpha"], 3) == [[Passage("T", "alpha beta")]]


def hostile(n, seed=0):
    """Strings of FTS5 operators, tags, control characters, any Unicode; the last one of 100 kB."""
    rng, tags = random.Random(seed), "<search> </search> <answer> </answer> </information>"
    pieces = [*"\"'*^():-+{};\0\n", *f"NEAR AND OR NOT alpha title: {tags}".split()]
    for _ in range(n - 1):
        text = ""
        for _ in range(rng.randrange(40)):
            letter = chr(rng.randrange(0x110000))
            text += rng.choice((rng.choice(pieces), " ", letter))
        yield text
    yield "<search> " + "alpha ( " * 12_500 + "</search>"


def test_hostile_text_as_queries_and_responses():
    """2,000 strings each: no exception, no operator taken for one, the index as it was, and no
    answer from a response that has none."""
    passages = [Passage("T", "alpha beta"), Passage("U", "gamma")]
    retriever = SqliteRetriever(passages)
    for text in hostile(2000):
        assert all(passage in passages for passage in retriever.search([text], 2)[0])
    for text in hostile(2000, seed=1):
        observation, reward, done = one_question(retriever).step(text)
        assert reward == 0 and done == (observation == "")
        assert done or observation.rstrip().endswith("</information>")
    assert retriever.search(["alpha gamma"], 3) == [passages[::-1]]


def test_retrieval_is_bm25_best_first():
    """Rare words weigh more, the title counts, k is a limit, and case and order do not matter."""
    river, guso = Passage("A", "river river river"), Passage("B", "river of Guso")
    retriever = SqliteRetriever([river, guso, Passage("Guso", "mayor")])
    (found,) = retriever.search(["GUSO river"], 3)
    assert found[0] == guso and len(found) == 3
    assert retriever.search(["river", "nothing"], 1) == [[river], []]


def test_common_words_cost_nothing_and_rare_ones_decide(monkeypatch):
    """Words are taken from the rarest on until they reach POSTINGS; one always counts; accents and
    case fold as in the index. In a small corpus all words count, as plain BM25 has it."""
    passages = []
    for i in range(50):
        rare = " rare" if i == 7 else ""
        name = " Émile" if i % 5 == 0 else ""
        passages.append(Passage(f"t{i}", f"the common{rare}{name}"))
    retriever = SqliteRetriever(passages)
    words = split_words("the EMILE rare absent common")
    assert set(retriever._rarest(words)) == {"the", "emile", "rare", "common"}
    monkeypatch.setattr(SqliteRetriever, "POSTINGS", 20)
    assert retriever._rarest(words) == ["rare", "emile"]
    assert retriever._rarest(["the"]) == ["the"]
    assert retriever.search(["the rare emile"], 1)[0][0] == passages[7]


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_index_on_disk(tmp_path, suffix):
    """Whole or not at all: the same answers as in memory, read-only, never over an old one, and
    what a killed build left isn't an index. The outer quotes of a title go; inner ones and the rest
    of the text stay."""
    corpus, index = tmp_path / f"c.jsonl{suffix}", tmp_path / "it's an %20index?.db"
    quoted = {"id": "0", "contents": '""Hey" he said"\nfirst "x"\nsecond'}
    with (gzip.open if suffix else open)(corpus, "wt") as f:
        f.write(json.dumps(quoted) + "\n" + '{"title": "T", "text": "alpha"}\n')
    passages = [Passage('"Hey" he said', 'first "x"\nsecond'), Passage("T", "alpha")]
    assert list(load_passages(corpus)) == passages
    (tmp_path / f"{index.name}.part").write_bytes(b"half an index")
    with pytest.raises(ValueError, match="no index there"):
        SqliteRetriever(index=index)
    build_index(corpus, index)
    retriever = SqliteRetriever(index=index)
    expected = SqliteRetriever(passages).search(["hey alpha"], 5)
    assert retriever.search(["hey alpha"], 5) == expected
    assert {path.name for path in tmp_path.iterdir()} == {corpus.name, index.name}
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        retriever.db.execute("DELETE FROM passage")
    with pytest.raises(ValueError, match="exists already"):
        build_index(corpus, index)
    with pytest.raises(ValueError, match="not an index of this program"):
        SqliteRetriever(index=corpus)
    no_passage = b'{"id": "1"}\n'
    corpus.write_bytes(gzip.compress(no_passage) if suffix else no_passage)
    with pytest.raises(ValueError, match="line 1: .*a passage needs"):
        build_index(corpus, tmp_path / "other.db")
    assert not (tmp_path / "other.db").exists()


def test_a_killed_build_leaves_no_index(tmp_path):
    """SIGKILL in the middle: no file has the index's name, and the next build works."""
    corpus, index = tmp_path / "c.jsonl", tmp_path / "i.db"
    write_lines(corpus, ({"contents": f"t{i}\n" + "word " * 40} for i in range(60_000)))
    args = [sys.executable, env_file.__file__, "index", str(corpus), str(index)]
    build = subprocess.Popen(args, stderr=subprocess.DEVNULL)
    while build.poll() is None and not os.path.exists(f"{index}.part"):
        time.sleep(0.01)
    time.sleep(0.2)
    build.kill()
    build.wait()
    assert not index.exists() and os.path.exists(f"{index}.part")
    write_lines(corpus, [{"contents": "t\nalpha"}])
    build_index(corpus, index)
    assert SqliteRetriever(index=index).search(["alpha"], 1) == [[Passage("t", "alpha")]]


def test_open_retriever(tmp_path):
    corpus, index = tmp_path / "c.jsonl", tmp_path / "i.db"
    write_lines(corpus, [{"contents": "t\nalpha"}])
    build_index(corpus, index)
    for path in (corpus, index):
        assert open_retriever(str(path)).search(["alpha"], 1) == [[Passage("t", "alpha")]]
    assert isinstance(open_retriever("http://there/retrieve"), HttpRetriever)


# ---- the retrieval server and its client ---------------------------------------------------------
@contextmanager
def serving(retriever, port=0):
    """The URL of a server in a thread of this process."""
    with serve(retriever, port) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/retrieve"
        finally:
            server.shutdown()


def test_server_and_client_are_the_index_itself():
    """Batched, any text, fewer hits than asked for; with scores and without."""
    passages = [Passage('a "quoted" title', "alpha\nbeta"), Passage("", "gamma alpha")]
    retriever = SqliteRetriever(passages)
    batches = [["alpha", "nothing at all", "gamma"], ["alpha", "gamma"], ['") OR', "\0"], []]
    with serving(retriever) as url:
        for queries in batches:
            assert HttpRetriever(url).search(queries, 3) == retriever.search(queries, 3)
        question = json.dumps({"queries": ["gamma"], "topk": None}).encode()
        bare = json.load(urlopen(Request(url, question)))
        assert bare == {"result": [[{"contents": '""\ngamma alpha'}]]}
        with pytest.raises(ConnectionError, match="/x refused with status 400"):
            HttpRetriever(url.replace("/retrieve", "/x")).search(["a"], 1)


@pytest.mark.parametrize(
    "hit, passage",
    [
        ({"document": {"contents": '"T"\nx'}, "score": 1.0}, Passage("T", "x")),
        ({"contents": "T\nx y\nz"}, Passage("T", "x y\nz")),
        ({"document": {"title": "T", "text": "x", "contents": "?"}}, Passage("T", "x")),
        ({"document": {"text": "x"}}, Passage("", "x")),
    ],
)
def test_answers_of_other_servers(hit, passage, monkeypatch):
    """Every form that Search-R1's servers send; no more hits than asked for, or none."""

    def answer(request, timeout):
        return io.BytesIO(json.dumps({"result": [[hit] * n]}).encode())

    monkeypatch.setattr(env_file, "urlopen", answer)
    for n in (0, 1, 9):
        assert HttpRetriever("http://there/retrieve").search(["q"], 3) == [[passage] * min(n, 3)]


@pytest.mark.parametrize(
    "answer, problem",
    [
        ({"result": []}, "0 results for 1 queries"),
        ({"result": [[{"document": {"content": "T\nx"}}]]}, "needs `contents`"),
        ({"results": [[]]}, "'result'"),
        ([], "did not answer as a retrieval server does"),
        ({"detail": "Internal Server Error"}, "Internal Server Error"),
    ],
)
def test_other_answers_are_errors(answer, problem, monkeypatch):
    """The error shows what came, and never passes for an empty answer."""

    def answer_so(request, timeout):
        return io.BytesIO(json.dumps(answer).encode())

    monkeypatch.setattr(env_file, "urlopen", answer_so)
    with pytest.raises(ConnectionError, match=f"http://there/retrieve .*{problem}"):
        HttpRetriever("http://there/retrieve").search(["q"], 3)


BUSY = HTTPError("u", 503, "", {}, io.BytesIO(b"busy"))
FAILURES = [b"<html>", b"", b'{"result": [[', BUSY, TimeoutError()]


@pytest.mark.parametrize("failure", FAILURES)
def test_what_fails_is_tried_again(failure, monkeypatch):
    """A page instead of JSON, nothing, half an answer, a busy server, silence: asked again, with
    growing waits, until it answers or the tries are over. Then the error has the URL and what came
    last."""
    waits, tries = [], []

    def answer(request, timeout):
        tries.append(request)
        expected = {"queries": ["q"], "topk": 1, "return_scores": True}
        assert json.loads(request.data) == expected
        if len(tries) > failures:
            return io.BytesIO(b'{"result": [[]]}')
        if isinstance(failure, Exception):
            raise failure
        return io.BytesIO(failure)

    monkeypatch.setattr(env_file, "urlopen", answer)
    monkeypatch.setattr(env_file.time, "sleep", waits.append)
    failures = 2
    assert HttpRetriever("http://there").search(["q"], 1) == [[]]
    assert waits == [0.5, 1.0]
    failures = 99
    tries.clear()
    waits.clear()
    with pytest.raises(ConnectionError, match="http://there.* 4 tries; ."):
        HttpRetriever("http://there", retries=3).search(["q"], 1)
    assert len(tries) == 4 and waits == [0.5, 1.0, 2.0]


def test_many_clients_lose_nothing():
    """16 at once, 50 queries each, over loopback."""
    retriever, found = SqliteRetriever(ToyWiki(0).passages), {}
    queries = [f"home of {passage.title}" for passage in ToyWiki(0).passages[:50]]
    with serving(retriever) as url:

        def ask(n):
            client = HttpRetriever(url)
            found[n] = [client.search([query], 2)[0] for query in queries]

        threads = [Thread(target=ask, args=(n,)) for n in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert found == dict.fromkeys(range(16), retriever.search(queries, 2))


def test_a_server_that_is_killed_and_comes_back(tmp_path):
    """In the middle of a run: the client waits for it and continues. Where it does not come back,
    that is an error, and not an empty result."""
    corpus, index = tmp_path / "c.jsonl", tmp_path / "i.db"
    write_lines(corpus, [{"contents": "t\nalpha"}])
    build_index(corpus, index)

    def start(port):
        args = [sys.executable, env_file.__file__, "serve", str(index), "--port", str(port)]
        server = subprocess.Popen(args, stdout=subprocess.PIPE, text=True)
        return server, server.stdout.readline().strip()

    def stop(server):
        server.kill()
        server.wait()

    server, url = start(0)
    client, found = HttpRetriever(url, wait=0.2), []
    found += client.search(["alpha"], 1)
    stop(server)
    waiting = Thread(target=lambda: found.extend(client.search(["alpha"], 1)))
    waiting.start()
    time.sleep(0.3)
    server, _ = start(url.split(":")[2].split("/")[0])
    waiting.join()
    assert found == [[Passage("t", "alpha")]] * 2
    stop(server)
    with pytest.raises(ConnectionError, match="in 2 tries"):
        HttpRetriever(url, retries=1, wait=0.01).search(["alpha"], 1)


# ---- data sets -----------------------------------------------------------------------------------
GOOD = '{"id": "a", "question": "who ?", "golden_answers": ["x", "y"]}\n'


def test_questions_in_every_format(tmp_path):
    """FlashRAG's lines, plain and compressed, and HotpotQA's own JSON. A `;` would join two
    questions, and an answer that is an article alone could never be right."""
    lines, packed, hotpot = (tmp_path / name for name in ("q.jsonl", "q.jsonl.gz", "h.json"))
    lines.write_text(GOOD + '{"id": 1, "question": " a; b? ", "golden_answers": ["the", "z"]}\n')
    q, h = f"{tmp_path.name}/q", f"{tmp_path.name}/h"
    first = Task(f"{q}:a", ("who ?",), (("x", "y"),))
    second = Task(f"{q}:1", ("a, b?",), (("z",),))
    assert load_questions(lines) == [first, second]
    packed.write_bytes(gzip.compress(GOOD.encode()))
    assert load_questions(packed) == [first]
    hotpot.write_text('[{"_id": "h", "question": "q", "answer": "yes", "context": []}]')
    assert load_questions(hotpot) == [Task(f"{h}:h", ("q",), (("yes",),))]


@pytest.mark.parametrize(
    "line, problem",
    [
        ("{", ""),
        ("[]", ""),
        ('{"id": "b", "question": "q"}', ""),
        ('{"question": "q", "golden_answers": ["x"]}', "id"),
        ('{"id": "b", "question": "q", "golden_answers": "x"}', "the answers"),
        ('{"id": "b", "question": "q", "golden_answers": []}', "the answers"),
        ('{"id": "b", "question": "q", "golden_answers": ["the"]}', "the answers"),
        ('{"id": "b", "question": "q", "golden_answers": [7]}', "the answers"),
        ('{"id": "b", "question": "", "golden_answers": ["x"]}', "the question is ''"),
        ('{"id": "a", "question": "q", "golden_answers": ["x"]}', "id 'a'"),
    ],
)
def test_a_line_that_is_not_a_question_is_named(tmp_path, line, problem):
    (tmp_path / "q.jsonl").write_text(GOOD + line + "\n")
    with pytest.raises(ValueError, match=f"q.jsonl, line 2: .*{problem}"):
        load_questions(tmp_path / "q.jsonl")


def test_parquet_needs_pyarrow_and_says_so(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ValueError, match="pip install pyarrow"):
        load_questions(tmp_path / "q.parquet")


def test_compose_uses_every_question_once():
    """Seeded, k at a time, over all sources; fewer than k are left over."""
    questions = [Task(str(i), (f"q{i}",), ((str(i),),)) for i in range(20)]
    tasks = compose(questions, 3, seed=1)
    assert tasks == compose(questions, 3, seed=1) != compose(questions, 3, seed=2)
    assert len({task.id for task in tasks}) == len(tasks) == 6
    used = []
    for task in tasks:
        used += task.questions
        assert task.questions == tuple(f"q{accepted[0]}" for accepted in task.answers)
    assert len(set(used)) == len(used) == 18
    with pytest.raises(ValueError, match="20 questions make no task of 21"):
        compose(questions, 21)


# ---- the toy -------------------------------------------------------------------------------------
@pytest.mark.parametrize("k", [1, 2, 8, 16])
def test_expert_solves_every_task_from_its_memory_alone(k):
    """Every fact it needs is retrieved, within the turns it has. A copy of the expert that has
    forgotten all but (q, last response, last observation) says the same: the compact state
    suffices."""
    for env in toy_envs("test", 24, k):
        done, calls = False, 0
        while not done:
            response, calls = ToyWiki.expert(env), calls + 1
            amnesiac = SearchEnv(env.task, env.retriever)
            amnesiac.response, amnesiac.observation = env.response, env.observation
            assert ToyWiki.expert(amnesiac) == response
            _, _, done = env.step(response)
        assert env.score()["em"] == env.score()["f1"] == k and k < calls <= 2 * k + 1


def play(env, **habits):
    """The expert's responses, to the end."""
    responses, done = [], False
    while not done:
        responses.append(ToyWiki.expert(env, **habits))
        _, _, done = env.step(responses[-1])
    return responses


def facts_of(env):
    """{"relation of entity": value}, read off the passages."""
    facts = {}
    for passage in env.retriever.search(["home teacher craft river mayor"], 1000)[0]:
        for fact, value in re.findall(r"(\w+ of \w+) is (.*?) \.", passage.text):
            facts[fact] = value
    return facts


@pytest.mark.parametrize("k", [1, 4])
def test_the_habit_of_the_first_hop(k):
    """Of a two-hop question the answer is what the first hop finds; others are right. Half a habit
    is had in half of the cases."""
    halves = []
    for env in toy_envs("test", 24, k):
        facts = facts_of(env)
        play(env, first_hop=1.0)
        for question, answer, right in zip(env.task.questions, env.answers, env.task.answers):
            inner = " of ".join(question.split(" of ")[-2:])
            assert answer == facts[inner]
            assert (answer == right[0]) == (inner == question)
    for env in toy_envs("test", 400, 1):
        if env.task.questions[0].count(" of ") == 2:
            play(env, first_hop=0.5)
            halves.append(env.score()["em"])
    assert 0.4 < sum(halves) / len(halves) < 0.6 and len(halves) > 100


def test_the_habit_of_giving_up():
    """It answers as soon as it knows something, or, with a share, with that chance at every turn
    that leaves a question open; what it answers is right."""
    for env in toy_envs("test", 24, 4):
        assert len(play(env, give_up=1.0)) in (2, 3) and len(env.answers) == 1
    turns = ends = 0
    for env in toy_envs("test", 200, 8):
        responses = play(env, give_up=0.2)
        right = [accepted[0] for accepted in env.task.answers]
        assert env.answers == right[: len(env.answers)]
        ends += len(env.answers) < 8
        turns += sum("known next" not in response for response in responses)
        turns -= len(env.answers) == 8  # nothing is open there
    assert abs(ends / turns - 0.2) < 3 * (0.2 * 0.8 / turns) ** 0.5


@pytest.mark.parametrize("turns", [2, 3, 5, 8])
def test_on_the_last_turn_the_expert_answers_with_what_it_knows(turns):
    """Whatever the turns that are left: what is answered is right and in its place."""
    scores = []
    for env in toy_envs("test", 16, 4):
        env.turns_left = turns
        assert len(play(env)) <= turns
        known = [accepted[0] for accepted in env.task.answers]
        answers = [answer for answer in env.answers if answer]
        assert answers == known[: len(answers)]
        scores.append(env.score()["em"])
        assert scores[-1] == len(answers) >= (turns - 1) // 2
    assert max(scores) > min(scores)


def test_habits_are_those_of_the_task_and_the_turn():
    """The same slips every time."""
    for env, again in zip(toy_envs("test", 8, 4), toy_envs("test", 8, 4)):
        assert play(env, first_hop=0.5, give_up=0.2) == play(again, first_hop=0.5, give_up=0.2)


def test_worlds_share_names_and_no_facts():
    """Nothing can be memorised: train and test answer the same question differently."""
    a, b = ToyWiki("train-0-0"), ToyWiki("test-0-0")
    assert a.facts.keys() == b.facts.keys()
    entities = {entity for _, entity in a.facts}
    assert len(entities) == 120 + 60  # people and towns: rivers and crafts are answers alone
    same = sum(a.facts[fact] == b.facts[fact] for fact in a.facts)
    assert same < 0.05 * len(a.facts)
    assert ToyWiki(3).facts == ToyWiki(3).facts
    assert ToyWiki(3).tasks(5, 2) == ToyWiki(3).tasks(5, 2)


def test_tasks_are_one_and_two_hops_without_repeats():
    tasks = ToyWiki(0).tasks(50, 8)
    hops = []
    for task in tasks:
        hops += [question.count(" of ") for question in task.questions]
        assert len(set(task.questions)) == len(set(task.answers)) == 8
    assert set(hops) == {1, 2} and 0.2 < hops.count(2) / len(hops) < 0.6
    assert len({task.id for task in tasks}) == 50


def test_a_horizon_that_the_toy_cannot_hold_is_an_error_and_not_an_endless_loop():
    with pytest.raises(ValueError, match="no 200 questions without a name in common"):
        ToyWiki(0).tasks(1, 200)


def test_toy_texts_are_what_a_model_of_the_toy_reads_and_writes():
    """Prompts, responses and observations of whole episodes; the same texts every time."""
    texts = toy_texts()
    assert texts == toy_texts()
    env = toy_envs("train", 40, 3)[0]
    assert env.prompt() in texts
    for response, observation, _ in expert_episode(env):
        assert response in texts and observation in texts
    assert env.score() == {"em": 3, "f1": 3, "answered": 1, "solved": 1}


# ---- the commands --------------------------------------------------------------------------------
def test_demo():
    out = command()
    assert out.returncode == 0 and "EM 2, F1 2" in out.stdout, out.stderr


@pytest.mark.parametrize(
    "args, message",
    [
        (["index", "nothing.jsonl", "i.db"], "nothing.jsonl"),
        (["serve", "nothing.db"], "no index there"),
        (["frobnicate"], "invalid choice"),
    ],
)
def test_command_line_errors(args, message, tmp_path):
    out = command(*args, cwd=tmp_path)
    assert out.returncode and message in out.stderr and "Traceback" not in out.stderr
