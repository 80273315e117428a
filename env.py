"""The environment E of Eq. 1: search tasks with compact memory, retrieval and scores (Section 4.1).

One task joins k questions. At every turn the agent writes its memory, then a search or all answers:

    q    = protocol + "Questions : q1 ; q2"
    a_t  = <think> memory </think> <search> query </search>      or  ... <answer> a1 ; a2 </answer>
    o_t  = <information> [ n turns left ] passages </information>

`SearchEnv` speaks this protocol; retrievers find passages in an index or ask a server; loaders read
the public data sets. `ToyWiki` invents an encyclopedia with questions and a scripted expert, so
that everything runs offline. No model and no token ids; needs the standard library and tqdm.

    python env.py                            # one episode of the expert, as text
    python env.py index CORPUS INDEX         # a wiki-18 JSONL file, plain or .gz, to an index
    python env.py serve INDEX --port 8000    # the index for several machines: Search-R1's /retrieve
"""

import argparse
import gzip
import json
import os
import random
import re
import signal
import sqlite3
import string
import time
import unicodedata
import warnings
import zlib
from collections import Counter, defaultdict
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import cache
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import ProxyHandler, Request, build_opener, urlopen

from tqdm import tqdm

PROTOCOL = (
    "Answer all the questions . At every turn you see only this text , your last response and the "
    "passages that it found . First write <think> all that you know so far , and what is next "
    "</think> . Then write either <search> one query </search> or , when nothing is open , "
    "<answer> all answers , joined by ; </answer> ."
)
BROKEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError)  # data of another form
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)


@dataclass(frozen=True)
class Task:
    """k questions with the accepted answers (aliases) of each."""

    id: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]

    def __post_init__(self):
        if not self.questions or len(self.questions) != len(self.answers) or not all(self.answers):
            raise ValueError(f"task {self.id}: needs at least one question, and an answer for each")


class SearchEnv:
    """One episode of one task. reward ("em" or "f1", by the definition `scores`, one of RULES) is
    summed over questions and given at the end; an observation holds as many whole passages as fit
    `budget`, by length(text) or in words."""

    stop = ("</search>", "</answer>")  # a response ends with one of these

    def __init__(
        self, task, retriever, reward="em", top_k=2, budget=None, length=None, scores="squad"
    ):
        if reward not in ("em", "f1"):
            raise ValueError(f"reward must be 'em' or 'f1', not {reward!r}")
        self.task, self.retriever, self.reward, self.top_k = task, retriever, reward, top_k
        self.budget, self.length = budget, length or (lambda text: len(text.split()))
        self.scores = scores
        self.turns_left = 2 * len(task.questions) + 2
        self.response = self.observation = ""  # the newest of each: all that memory may keep
        self.answers: list[str] | None = None  # None until the agent has answered

    def prompt(self):
        """The text of q, the same in every call: the protocol and the questions."""
        return f"{PROTOCOL}\nQuestions : {plain(' ; '.join(self.task.questions))}\n"

    def step(self, response: str) -> tuple[str, float, bool]:
        """Eq. 1: (o_t, r_t, d_t) = E(a_t)."""
        return self.step_all([self], [response])[0]

    @staticmethod
    def step_all(envs: list["SearchEnv"], responses: list[str]) -> list[tuple[str, float, bool]]:
        """Eq. 1 for all live environments at once, with one batched retrieval. A malformed response
        (no search, no answer) or a search on the last turn ends the episode with reward 0."""
        queries = [env.read_action(response) for env, response in zip(envs, responses, strict=True)]
        groups, found = defaultdict(list), {}
        for i, env in enumerate(envs):
            if queries[i] is not None:
                groups[env.retriever, env.top_k].append(i)
        for (retriever, top_k), members in groups.items():
            passages = retriever.search([queries[i] for i in members], top_k)
            found.update(zip(members, passages, strict=True))
        results = []
        for i, env in enumerate(envs):
            if i in found:
                results.append((env.observe(found[i]), 0.0, False))
            else:
                results.append(("", env.score()[env.reward], True))
        return results

    def read_action(self, response):
        """Take a turn: the query of a response that may search, or None where the episode ends."""
        self.response, self.turns_left = response, self.turns_left - 1
        found = ACTION.search(response)  # in generated text only: the prompt shows the tags, too
        if found and found[1] == "answer":
            self.answers = [answer.strip() for answer in found[2].split(";")]
        searches = found and found[1] == "search" and self.turns_left
        return found[2].strip() if searches else None

    def observe(self, passages):
        """The text of o_t. A passage that does not fit is left out whole, the last one first."""
        hint = f"{self.turns_left} turns left" if self.turns_left > 1 else "last turn : answer now"
        for n in range(len(passages), -1, -1):
            body = plain(" ".join(f"( {p.title} ) {p.text}" for p in passages[:n]))
            if n == 0:
                body = "what was found is too long" if passages else "nothing found"
            self.observation = f"\n<information> [ {hint} ] {body} </information>\n"
            if self.budget is None or self.length(self.observation) <= self.budget:
                break
        return self.observation

    def score(self) -> dict[str, float]:
        """EM and F1 over the questions: answer i belongs to question i, a missing one scores 0. By
        MEM1's rule nothing counts unless there are as many answers as questions. And whether there
        was an answer, and all were right."""
        n, answers, em, f1 = len(self.task.questions), self.answers or [], 0.0, 0.0
        if self.scores != "mem1" or len(answers) == n:
            for answer, accepted in zip(answers, self.task.answers):
                em += exact_match(answer, accepted, self.scores)
                f1 += token_f1(answer, accepted, self.scores)
        answered, solved = self.answers is not None, em == n
        return {"em": em, "f1": f1, "answered": float(answered), "solved": float(solved)}


def plain(text):
    """Data without markup: `</information>` and `<|im_end|>` become `< /information>` and so on, so
    that no passage or question can end a block or a turn."""
    return re.sub(r"<(?=[^\s<>]+>)", "< ", text)


RULES = ("squad", "hotpotqa", "mem1")  # whose definition of EM and F1


def normalize(text, rule="squad"):
    """SQuAD's normal form. MEM1 keeps articles, and puts a space where punctuation was."""
    instead = " " if rule == "mem1" else ""
    text = "".join(instead if c in string.punctuation else c for c in text.lower())
    if rule != "mem1":
        text = re.sub(r"\b(a|an|the)\b", " ", text)
    return " ".join(text.split())


def exact_match(prediction, answers, rule="squad"):
    """1.0 if the prediction equals any of the aliases `answers` in normal form, else 0.0."""
    return float(any(normalize(prediction, rule) == normalize(answer, rule) for answer in answers))


def token_f1(prediction, answers, rule="squad"):
    """Token F1, the maximum over the aliases. MEM1 counts a repeated token once; for HotpotQA yes,
    no and noanswer match only themselves."""
    predicted = normalize(prediction, rule)
    return max(_f1(predicted, normalize(answer, rule), rule) for answer in answers)


def _f1(predicted, gold, rule):
    if predicted == gold:
        return float(bool(gold) or rule != "hotpotqa")
    if rule == "hotpotqa" and {predicted, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    count = set if rule == "mem1" else list
    predicted, gold = Counter(count(predicted.split())), Counter(count(gold.split()))
    same = (predicted & gold).total()
    return 2 * same / (predicted.total() + gold.total()) if same else 0.0


# ---- retrieval: search(queries, k) -> for each query its best passages ---------------------------
@dataclass(frozen=True)
class Passage:
    title: str
    text: str


# an index is closed with its object; closing it from a finalizer would swallow a Ctrl-C
warnings.filterwarnings("ignore", "unclosed database", ResourceWarning)


class SqliteRetriever:
    """BM25 in SQLite's FTS5, in memory or in an index that `build_index` made. The words of a query
    are joined by OR; the rarest count, as many as POSTINGS passages hold together. FTS5 finds words
    between spaces and punctuation: Chinese and Japanese, which have none, need another server."""

    MAX_WORDS = 64  # FTS5 fails on much longer queries, and no good one has more
    POSTINGS = 40_000  # passages that are ranked for a query, give or take one word
    BEST = (
        "SELECT -score, title, text FROM (SELECT rowid AS id, rank AS score FROM passage "
        "WHERE passage MATCH ? ORDER BY rank, rowid LIMIT ?) "
        "JOIN passage ON passage.rowid = id ORDER BY score, id"
    )

    def __init__(self, passages=(), index=None):
        self.lock, self.name = Lock(), index or "passages"
        if index is None:
            self.db = sqlite3.connect(":memory:", check_same_thread=False)
            _fill(self.db, passages)
            return
        if not os.path.isfile(index):
            raise ValueError(f"{index}: no index there; run `python env.py index CORPUS {index}`")
        uri = f"file:{quote(str(index))}?mode=ro"
        self.db = sqlite3.connect(uri, uri=True, check_same_thread=False)
        try:
            self.db.execute("SELECT docs FROM frequency LIMIT 1")
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{index}: not an index of this program ({error})") from None

    def search(self, queries, k):
        """The k best passages for each query, best first; none where no word of it occurs."""
        results = []
        for query in queries:
            results.append([passage for _, passage in self.ranked(query, k)])
        return results

    def ranked(self, query, k):
        """`search` for one query, with the BM25 score of each passage."""
        try:
            with self.lock:
                match = " OR ".join(f'"{word}"' for word in self._rarest(split_words(query)))
                rows = self.db.execute(self.BEST, (match, k)) if match else []
                return [(score, Passage(title, text)) for score, title, text in rows]
        except sqlite3.DatabaseError as error:
            raise ValueError(f"{self.name}: cannot be searched ({error})") from None

    def _rarest(self, words):
        docs = {}
        for word in list(dict.fromkeys(words))[: self.MAX_WORDS]:
            row = self.db.execute("SELECT docs FROM frequency WHERE word = ?", (word,)).fetchone()
            if row:  # a word that no passage has says nothing
                docs[word] = row[0]
        chosen, total = [], 0
        for word in sorted(docs, key=docs.get):
            total += docs[word]
            if chosen and total > self.POSTINGS:
                break
            chosen.append(word)
        return chosen


def nfc(text):
    """The one Unicode form in which passages and queries meet."""
    return unicodedata.normalize("NFC", text)


@cache
def _splitter():
    db = sqlite3.connect(":memory:", check_same_thread=False)
    db.execute("CREATE VIRTUAL TABLE query USING fts5(text)")
    db.execute("CREATE VIRTUAL TABLE term USING fts5vocab(query, instance)")
    return db, Lock()


def split_words(query):
    """The words of a query, split and folded by FTS5 itself, as in an index."""
    text = nfc(query).encode(errors="replace").decode()  # half a surrogate pair is no text
    db, lock = _splitter()
    with lock:
        db.execute("INSERT INTO query VALUES (?)", (text,))
        words = [word for (word,) in db.execute("SELECT term FROM term ORDER BY offset")]
        db.rollback()
    return words


def _fill(db, passages):
    rows = ((nfc(p.title), nfc(p.text)) for p in passages)
    with db:
        db.execute("CREATE VIRTUAL TABLE passage USING fts5(title, text)")
        db.executemany("INSERT INTO passage VALUES (?, ?)", rows)
        db.execute("CREATE VIRTUAL TABLE temp.word USING fts5vocab(main, passage, row)")
        db.execute("CREATE TABLE frequency (word TEXT PRIMARY KEY, docs INTEGER) WITHOUT ROWID")
        db.execute("INSERT INTO frequency SELECT term, doc FROM temp.word")


def build_index(corpus, index):
    """Write the passages of a JSONL file to an index on disk, whole or not at all."""
    part = f"{os.fspath(index)}.part"
    if os.path.exists(index):
        raise ValueError(f"{os.fspath(index)} exists already; remove it, or choose another name")
    if os.path.exists(part):
        os.remove(part)  # what a killed build left
    with closing(sqlite3.connect(part)) as db:
        # no need to roll back
        db.executescript("PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF")
        _fill(db, load_passages(corpus, progress=True))
    os.replace(part, index)


class HttpRetriever:
    """Search-R1's protocol: POST {"queries", "topk", "return_scores"} brings {"result": [[hit,
    ...], ...]}, where a hit is {"document": {...}, "score": x} or the bare document."""

    def __init__(self, url, timeout=60.0, retries=6, wait=0.5):
        self.url, self.timeout, self.retries, self.wait = url, timeout, retries, wait
        parts = re.fullmatch(r"https?://(\[[\da-fA-F:.]+\]|[^/:\[\]]+)(:\d+)?(/.*)?", url)
        if not parts:
            raise ValueError(f"{url}: not the URL of a retrieval server")
        local = re.fullmatch(r"localhost|127\..*|\[::1\]", parts[1])  # where no proxy has a part
        self.open = build_opener(ProxyHandler({})).open if local else None

    def search(self, queries, k):
        """As SqliteRetriever's. A failure or a broken reply is tried again `retries` times, after
        twice the wait each; in the end, or if the server refuses or speaks otherwise,
        ConnectionError names the URL: it is never an empty answer."""
        # without scores, the servers of Search-R1 fail, or unpack two results as one pair
        answer = self._ask({"queries": queries, "topk": k, "return_scores": True})
        try:
            results = []
            for hits in answer["result"]:
                documents = [hit.get("document", hit) for hit in hits[:k]]
                results.append([passage_of(document) for document in documents])
            if len(results) != len(queries):
                raise ValueError(f"{len(results)} results for {len(queries)} queries")
            return results
        except BROKEN as error:
            problem = f"did not answer as a retrieval server does ({error})"
            raise ConnectionError(f"{self.url} {problem}: {json.dumps(answer)[:300]}") from None

    def _ask(self, question):
        body = json.dumps(question).encode()
        request = Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(self.retries + 1):
            if attempt:
                time.sleep(self.wait * 2 ** (attempt - 1))
            try:
                with (self.open or urlopen)(request, timeout=self.timeout) as response:
                    return json.load(response)
            except HTTPError as error:
                problem = f"status {error.code}"
                with suppress(OSError, HTTPException):
                    problem += f": {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code not in (408, 429):  # asking again will not help
                    raise ConnectionError(f"{self.url} refused with {problem}") from None
            except (OSError, HTTPException, ValueError, RecursionError) as error:
                problem = f"{type(error).__name__}: {error}"
        raise ConnectionError(f"{self.url}: no answer in {self.retries + 1} tries; {problem}")


def open_retriever(corpus):
    """From a server's URL, a JSONL file of passages (read into memory), or an index on disk."""
    if corpus.startswith(("http://", "https://")):
        return HttpRetriever(corpus)
    if corpus.removesuffix(".gz").endswith(".jsonl"):
        return SqliteRetriever(load_passages(corpus))
    return SqliteRetriever(index=corpus)


def serve(retriever, port, host="127.0.0.1"):
    """A server of that protocol at http://host:port/retrieve; port 0 takes a free one. What it does
    not read to its end (411, 413, 400) it answers and closes."""

    class Handler(BaseHTTPRequestHandler):
        """POST /retrieve, and nothing else."""

        protocol_version, timeout = "HTTP/1.1", 60

        def do_POST(self):
            status, answer = self.answer()
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            if status != 200:
                self.send_header("Connection", "close")
            self.end_headers()
            self.wfile.write(body)

        def answer(self):
            lengths = self.headers.get_all("Content-Length", [])
            if self.headers["Transfer-Encoding"] or not lengths:
                return 411, {"error": "a request needs a Content-Length"}
            if len(lengths) > 1 or not re.fullmatch("[0-9]+", lengths[0]):
                return 400, {"error": "the Content-Length must be one number"}
            if len(lengths[0]) > 8:
                return 413, {"error": "a request has less than 100 MB"}
            try:
                asked = json.loads(self.rfile.read(int(lengths[0])))
                queries, k = asked["queries"], asked.get("topk")
                k = 3 if k is None else k
                texts = isinstance(queries, list) and all(isinstance(q, str) for q in queries)
                if self.path != "/retrieve" or not texts or type(k) is not int or not 0 < k < 1000:
                    raise ValueError
            except BROKEN:
                return 400, {"error": 'POST {"queries": [...], "topk": n} to /retrieve'}
            try:
                ranked = [retriever.ranked(query, k) for query in queries]
                return 200, {"result": [hits(asked, best) for best in ranked]}
            except ValueError as error:  # the index is at fault, not the client
                return 500, {"error": str(error)}

        def log_message(self, *args):
            """Quiet."""

    def hits(asked, best):
        found = [(score, {"contents": f'"{p.title}"\n{p.text}'}) for score, p in best]
        if asked.get("return_scores"):
            return [{"document": document, "score": score} for score, document in found]
        return [document for _, document in found]

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # many environments may ask at once

        def handle_error(self, request, client_address):
            """Quiet: a client that went away is no concern of ours."""

    return Server((host, port), Handler)


# ---- data sets -----------------------------------------------------------------------------------
def load_questions(path):
    """A task per question of FlashRAG's JSONL, plain or .gz, HotpotQA's own JSON, or MEM1's
    parquet. Sets number alike, so that an id says its file, too: `nq/test:test_0`. A `;` becomes a
    comma, since it joins questions. Raises ValueError naming the line (or entry) without a question
    or an answer, or with an id seen before."""
    seen, file = set(), Path(os.path.abspath(path))
    source = f"{file.parent.name}/{file.name.partition('.')[0]}"

    def read(record):
        flashrag = "golden_answers" in record  # else HotpotQA
        name, question = record.get("id" if flashrag else "_id"), record.get("question")
        answers = record["golden_answers"] if flashrag else [record.get("answer")]
        if not isinstance(name, (str, int)) or name in seen:
            raise ValueError(f"the id {name!r} is none, or seen before")
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"the question is {question!r}")
        texts = isinstance(answers, list) and all(isinstance(a, str) for a in answers)
        if not texts or not any(map(normalize, answers)):
            raise ValueError(f"the answers must be texts, one of them with a word, not {answers!r}")
        "".join([str(name), question, *answers]).encode()  # half a surrogate pair is no text
        seen.add(name)
        question = question.strip().replace(";", ",")
        return Task(f"{source}:{name}", (question,), (tuple(filter(normalize, answers)),))

    tasks = list(json_records(path, read))
    if not tasks:
        raise ValueError(f"{path}: no questions in it")
    return tasks


def load_passages(path, progress=False):
    """The passages of a wiki-18 JSONL file. Raises ValueError naming a line that isn't one."""
    return json_records(path, passage_of, progress)


def passage_of(record):
    """A document: `contents` (a quoted title, newline, text) or `text` with `title`; else
    ValueError."""
    title, text = record.get("title"), record.get("text")
    if not isinstance(text, str):
        contents = record.get("contents")
        if not isinstance(contents, str):
            raise ValueError(f"a passage needs `contents`, or `text`, not only {', '.join(record)}")
        first, _, text = contents.partition("\n")
        title = title or first
    if not isinstance(title, (str, int, float, type(None))):
        raise ValueError(f"the title is {title!r}")
    f"{title}{text}".encode()  # half a surrogate pair is no text
    return Passage(str(title or "").strip().removeprefix('"').removesuffix('"'), text)


def json_records(path, read, progress=False):
    """read(record) of every record of a JSONL (plain or .gz), JSON or parquet file, one at a time.
    Raises ValueError naming the line (or entry) that isn't a record or that `read` refuses."""
    path = os.fspath(path)
    for where, record in _raw_records(path, progress):
        try:
            record = json.loads(record) if isinstance(record, bytes) else record
            if not isinstance(record, dict):
                raise ValueError(f"{str(record)[:40]} is no record")
            found = read(record)
        except BROKEN as error:
            raise ValueError(f"{path}, {where}: cannot be read ({error})") from None
        yield found


def _raw_records(path, progress):
    """(where, record) pairs; a record of JSONL is bytes. Blank lines are none."""
    plain_name = path.removesuffix(".gz")
    try:
        if path.endswith(".parquet"):
            from pyarrow import parquet

            for number, record in enumerate(parquet.read_table(path).to_pylist(), 1):
                yield f"entry {number}", record
            return
        bar = tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, disable=not progress)
        with bar, open(path, "rb") as raw, gzip.open(raw) if plain_name != path else raw as f:
            if plain_name.endswith(".json"):
                for number, record in enumerate(json.load(f), 1):
                    yield f"entry {number}", record
                return
            for number, line in enumerate(f, 1):
                if line.removeprefix(b"\xef\xbb\xbf").strip():
                    yield f"line {number}", line
                if number % 1000 == 0:
                    bar.update(raw.tell() - bar.n)
    except ImportError:
        raise ValueError(f"{path}: parquet needs pyarrow (pip install pyarrow)") from None
    except (EOFError, zlib.error, gzip.BadGzipFile, *BROKEN) as error:
        hint = "; one record a line is a .jsonl" if "Extra data" in str(error) else ""
        raise ValueError(f"{path}: damaged, or not what its name says ({error}){hint}") from None


def compose(questions, k, seed=0):
    """Tasks of k questions, none used twice, in a seeded order. Raises ValueError if there is not
    one, or if an id occurs twice: all that is known of a task is kept under its id."""
    (name, n), *_ = Counter(task.id for task in questions).most_common(1) or [("", 0)]
    if n > 1:
        raise ValueError(f"the question {name} is there {n} times: an id is one question's")
    shuffled = random.Random(f"compose {seed}").sample(questions, len(questions))
    if len(shuffled) < k:
        raise ValueError(f"{len(shuffled)} questions make no task of {k}")
    tasks = []
    for i in range(0, len(shuffled) - k + 1, k):
        group = shuffled[i : i + k]
        questions = tuple(question for task in group for question in task.questions)
        answers = tuple(accepted for task in group for accepted in task.answers)
        tasks.append(Task("+".join(task.id for task in group), questions, answers))
    return tasks


# ---- an invented encyclopedia --------------------------------------------------------------------
def _names(n):
    """n invented names, the same in every world."""
    rng, names = random.Random(0), {}
    while len(names) < n:
        length = rng.choice((2, 2, 3))
        syllables = [rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(length)]
        names["".join(syllables).title()] = None
    return list(names)


_NAMES = _names(220)
_CRAFTS = (
    "baker barber brewer carpenter cobbler cooper cutler dyer fisher glazier hunter joiner mason "
    "miller potter saddler smith tailor tanner weaver"
).split()
ENTITIES = {
    "person": _NAMES[:120], "town": _NAMES[120:180], "river": _NAMES[180:], "craft": _CRAFTS,
}  # fmt: skip
RELATIONS = {
    "home": ("person", "town"), "teacher": ("person", "person"), "craft": ("person", "craft"),
    "river": ("town", "river"), "mayor": ("town", "person"),
}  # fmt: skip


class ToyWiki:
    """An invented encyclopedia. Names are the same for every seed and facts are not: a model can
    learn to read, and never to know. Every name and every answer is one word between spaces, hence
    one token: two answers that share a token are hard to copy from a list."""

    def __init__(self, seed):
        rng = random.Random(f"world {seed}")
        self.seed, self.facts, self.passages = seed, {}, []
        for relation, (kind, values) in RELATIONS.items():
            for entity in ENTITIES[kind]:
                others = [value for value in ENTITIES[values] if value != entity]
                self.facts[relation, entity] = rng.choice(others)
        for kind in ("person", "town"):
            relations = [r for r, (of, _) in RELATIONS.items() if of == kind]
            for e in ENTITIES[kind]:
                text = " ".join(f"{r} of {e} is {self.facts[r, e]} ." for r in relations)
                self.passages.append(Passage(e, text))
        for town in ENTITIES["town"]:  # distractors: they name people and towns and answer nothing
            a, b = rng.sample(ENTITIES["person"], 2)
            title = rng.choice(ENTITIES["river"])
            self.passages.append(Passage(title, f"{a} met {b} near {town} ."))
        rng.shuffle(self.passages)
        self.retriever = SqliteRetriever(self.passages)

    def tasks(self, n, k):
        """n tasks of k questions, of one hop or two, no name twice; ValueError if k is too
        large."""
        rng = random.Random(f"tasks {self.seed} {k}")
        return [self._task(f"world-{self.seed}-q{k}-{i}", k, rng) for i in range(n)]

    def _task(self, name, k, rng):
        chosen, used, facts = {}, set(), list(self.facts)
        for _ in range(1000 * k):  # a world has only so many names
            if len(chosen) == k:
                break
            relation, entity = rng.choice(facts)
            question, answer = f"{relation} of {entity}", self.facts[relation, entity]
            names = {entity, answer}
            onward = [r for r, (kind, _) in RELATIONS.items() if kind == RELATIONS[relation][1]]
            if onward and rng.random() < 0.5:
                outer = rng.choice(onward)
                question, answer = f"{outer} of {question}", self.facts[outer, answer]
                names.add(answer)
            if not names & used:
                chosen[question] = (answer,)
                used |= names
        if len(chosen) < k:
            raise ValueError(f"this world has no {k} questions without a name in common: ask fewer")
        return Task(name, tuple(chosen), tuple(chosen.values()))

    @staticmethod
    def expert(env, first_hop=0.0, give_up=0.0):
        """The scripted expert's next response, read off its last response and observation alone. On
        the last turn it answers with what it knows. Its bad habits, as shares of the chances: it
        takes the first of two hops for the answer; it answers while questions are open."""
        dice = random.Random(f"{env.task.id} {env.turns_left}")
        known, note, question = [], "", ""
        if env.response:
            layout = r"known (.*?)next (.*) </think> <search> (.*) </search>"
            memory, question, query = re.search(layout, env.response).groups()
            known = memory.split(" ; ")[:-1]
            value = re.search(rf"\b{query} is (.*?) \.", env.observation)[1]
            note = f"{query} is {value} ; "
            if question.endswith(f" of {query}") and dice.random() >= first_hop:
                query = question.removesuffix(query) + value  # what the second hop is about
            else:
                known, question = [*known, value], ""
        if not question and len(known) < len(env.task.questions):
            question = env.task.questions[len(known)]
            query = " of ".join(question.split(" of ")[-2:])
        memory = f"<think> {note}known " + "".join(f"{value} ; " for value in known)
        gives_up = known and dice.random() < give_up
        if not question or gives_up or "last turn" in env.observation:
            return f"{memory}done </think> <answer> {' ; '.join(known)} </answer>"
        return f"{memory}next {question} </think> <search> {query} </search>"


def toy_envs(split, n, k, seed=0, **settings):
    """n fresh episodes of k questions each, from up to 8 worlds made from split and seed."""
    worlds = [ToyWiki(f"{split}-{seed}-{w}") for w in range(min(n, 8))]
    envs = []
    for w, world in enumerate(worlds):
        for task in world.tasks(len(range(w, n, len(worlds))), k):
            envs.append(SearchEnv(task, world.retriever, **settings))
    return envs


def toy_texts():
    """What the toy's tokenizer is trained on: passages, and episodes of the expert."""
    texts = [f"( {p.title} ) {p.text}" for seed in range(4) for p in ToyWiki(seed).passages]
    for env in toy_envs("train", 40, 3):
        texts.append(env.prompt())
        for response, observation, _ in expert_episode(env):
            texts += [response, observation]
    return texts


def expert_episode(env):
    """The expert's turns, to the end: response, observation, reward."""
    done = False
    while not done:
        response = ToyWiki.expert(env)
        observation, reward, done = env.step(response)
        yield response, observation, reward


def main():
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    commands = parser.add_subparsers(dest="command")
    index = commands.add_parser("index", help="make an index on disk")
    index.add_argument("corpus", help="JSONL, plain or .gz: contents, or title and text, per line")
    index.add_argument("index", help="the file to write; it appears when it is whole")
    server = commands.add_parser("serve", help="answer POST /retrieve from an index")
    server.add_argument("index", help="what `index` wrote")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--host", default="127.0.0.1", help="address (default: this machine alone)")
    args = parser.parse_args()
    try:
        if args.command == "index":
            build_index(args.corpus, args.index)
        elif args.command == "serve":
            with serve(SqliteRetriever(index=args.index), args.port, args.host) as httpd:
                print(f"http://{args.host}:{httpd.server_port}/retrieve", flush=True)
                httpd.serve_forever()
        else:
            demo()
    except (ValueError, OSError, OverflowError, sqlite3.Error) as error:
        raise SystemExit(f"env.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


def demo():
    """An episode of the expert."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # a closed pipe ends it without a word
    (env,) = toy_envs("train", 1, k=2)
    print(f"the answers are {env.task.answers}\n\nq:\n{env.prompt()}")
    for t, (response, observation, reward) in enumerate(expert_episode(env)):
        print(f"a_{t}: {response}\no_{t}: {observation.strip()}   r_{t} = {reward:g}\n")
    print("EM {em:g}, F1 {f1:g}, summed over both questions".format(**env.score()))


if __name__ == "__main__":
    main()
