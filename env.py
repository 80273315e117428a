"""The environment E of Eq. 1: search tasks with compact memory, their retriever and their scores (Section 4.1).

One example joins k questions; at each turn the agent writes its memory and then either one search or all answers:

    q    = protocol + "Questions : q1 ; q2"
    a_t  = <think> memory </think> <search> query </search>      or  ... <answer> a1 ; a2 </answer>
    o_t  = <information> [ n turns left ] passages </information>

`SearchEnv` speaks this protocol. `SqliteRetriever` finds passages by BM25, in memory or in an index on disk;
`HttpRetriever` asks a server. `load_questions` and `load_passages` read the public data sets; `ToyWiki` invents an
encyclopedia with questions and a scripted expert, so that everything runs offline. No model, no token ids; needs the
standard library and tqdm.

    python env.py                            # one episode of the expert, as text
    python env.py index CORPUS INDEX         # a wiki-18 JSONL file (plain or .gz) into an index on disk
    python env.py serve INDEX --port 8000    # the same index for several machines: POST /retrieve as in Search-R1
    python env.py recall INDEX HOTPOTQA      # how many supporting passages it finds, and how long a query takes
"""
import argparse
import gzip
import json
import os
import random
import re
import sqlite3
import string
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from http.client import HTTPException
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from statistics import fmean
from threading import Lock
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import Request, urlopen

from tqdm import tqdm

PROTOCOL = (
    "Answer all the questions . At every turn you see only this text , your last response and the passages that it "
    "found . First write <think> all that you know so far , and what is next </think> . Then write either <search> one "
    "query </search> or , when nothing is open , <answer> all answers , joined by ; </answer> .")
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
STOP = ("</search>", "</answer>")  # a response ends with one of these


# ---- scores ----------------------------------------------------------------------------------------------------------

RULES = ("squad", "hotpotqa", "mem1")  # whose definition of EM and F1


def normalize(text: str, rule: str = "squad") -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces. MEM1 keeps articles, and puts a
    space where punctuation was."""
    if rule == "mem1":
        return " ".join("".join(" " if c in string.punctuation else c for c in text.lower()).split())
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answers: tuple[str, ...], rule: str = "squad") -> float:
    """1.0 if the prediction equals any of the aliases `answers` in normal form, else 0.0."""
    return float(any(normalize(prediction, rule) == normalize(a, rule) for a in answers))


def token_f1(prediction: str, answers: tuple[str, ...], rule: str = "squad") -> float:
    """Token F1, maximum over the aliases. SQuAD counts repeated tokens as often as they occur, MEM1 once; to HotpotQA
    yes, no and noanswer match nothing but themselves."""
    return max(_f1(normalize(prediction, rule), normalize(a, rule), rule) for a in answers)


def _f1(predicted: str, gold: str, rule: str) -> float:
    if predicted == gold:
        return float(bool(gold) or rule != "hotpotqa")
    if rule == "hotpotqa" and {predicted, gold} & {"yes", "no", "noanswer"}:
        return 0.0
    count = set if rule == "mem1" else list
    predicted, gold = Counter(count(predicted.split())), Counter(count(gold.split()))
    same = (predicted & gold).total()
    return 2 * same / (predicted.total() + gold.total()) if same else 0.0


# ---- retrieval -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Passage:
    title: str
    text: str


def passage_of(record: dict) -> Passage:
    """A document as wiki-18 and the retrieval servers write it: `contents` = quoted title, newline, text; or `text`,
    with or without `title`. Raises ValueError if it is none."""
    title, text = record.get("title"), record.get("text")
    if not isinstance(text, str):
        contents = record.get("contents")
        if not isinstance(contents, str):
            raise ValueError(f"a passage needs `contents`, or `title` and `text`, and not only {', '.join(record)}")
        first, _, text = contents.partition("\n")
        title = title or first
    return Passage(str(title or "").strip().removeprefix('"').removesuffix('"'), text)


class SqliteRetriever:
    """BM25 over passages, in SQLite's FTS5: in memory, or an index on disk that `build_index` made.

    A query is any text in any language; its words are joined by OR, each quoted, so that FTS5 sees none of its
    operators in them. The rarest words count, as many as POSTINGS passages hold together: common ones decide little and
    cost nearly all the time. In a small corpus that is all of them."""

    MAX_WORDS = 64     # FTS5 fails on much longer queries, and no good one has more
    POSTINGS = 40_000  # passages that are ranked for a query, give or take one word

    def __init__(self, passages: Iterable[Passage] = (), index: str | os.PathLike | None = None):
        if index is None:
            self.db = sqlite3.connect(":memory:", check_same_thread=False)
            _fill(self.db, passages)
        else:
            if not os.path.exists(index):
                raise ValueError(f"{index}: no index there; make one with `python env.py index CORPUS {index}`")
            self.db = sqlite3.connect(f"file:{quote(os.fspath(index))}?mode=ro", uri=True, check_same_thread=False)
            try:
                self.db.execute("SELECT docs FROM frequency LIMIT 1")
            except sqlite3.DatabaseError as error:
                raise ValueError(f"{index}: no index of this program ({error})") from None
        self.lock = Lock()

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """The k best passages for each query, best first; none where no word of it occurs."""
        return [[passage for _, passage in self.ranked(query, k)] for query in queries]

    def ranked(self, query: str, k: int) -> list[tuple[float, Passage]]:
        """As `search` for one query, with the BM25 score of each passage."""
        words = list(dict.fromkeys(re.findall(r"\w+", query)))[:self.MAX_WORDS]
        best = ("SELECT -score, title, text FROM (SELECT rowid AS id, rank AS score FROM passage WHERE passage MATCH ? "
                "ORDER BY rank, rowid LIMIT ?) JOIN passage ON passage.rowid = id ORDER BY score, id")
        with self.lock:
            match = " OR ".join(f'"{word}"' for word in self._rarest(words))
            rows = self.db.execute(best, (match, k)) if match else []
            return [(score, Passage(title, text)) for score, title, text in rows]

    def _rarest(self, words: list[str]) -> list[str]:
        docs = {word: self.db.execute("SELECT docs FROM frequency WHERE word = ?", (_folded(word),)).fetchone() or (0,)
                for word in words}
        chosen, total = [], 0
        for word in sorted(words, key=lambda word: docs[word]):
            total += docs[word][0]
            if chosen and total > self.POSTINGS:
                break
            chosen.append(word)
        return chosen


def _folded(word: str) -> str:
    """As FTS5's tokenizer folds it: lower case, no accents."""
    return "".join(c for c in unicodedata.normalize("NFKD", word.lower()) if not unicodedata.combining(c))


def _fill(db: sqlite3.Connection, passages: Iterable[Passage]) -> None:
    with db:
        db.execute("CREATE VIRTUAL TABLE passage USING fts5(title, text)")
        db.executemany("INSERT INTO passage VALUES (?, ?)", ((p.title, p.text) for p in passages))
        db.execute("CREATE VIRTUAL TABLE temp.word USING fts5vocab(main, passage, row)")
        db.execute("CREATE TABLE frequency (word TEXT PRIMARY KEY, docs INTEGER) WITHOUT ROWID")
        db.execute("INSERT INTO frequency SELECT term, doc FROM temp.word")


def build_index(corpus: str | os.PathLike, index: str | os.PathLike) -> None:
    """Write the passages of a JSONL file, plain or .gz, into an index on disk; whole or not at all."""
    part = f"{os.fspath(index)}.part"
    if os.path.exists(index):
        raise ValueError(f"{os.fspath(index)} exists already; remove it, or take another name")
    if os.path.exists(part):
        os.remove(part)  # what a killed build left
    db = sqlite3.connect(part)
    db.execute("PRAGMA journal_mode = OFF")  # a broken file is thrown away: nothing to roll back to
    db.execute("PRAGMA synchronous = OFF")
    _fill(db, load_passages(corpus, progress=True))
    db.close()
    os.replace(part, index)


class HttpRetriever:
    """A server of Search-R1's retrieval protocol: POST {"queries", "topk", "return_scores"} to its URL brings
    {"result": [[hit, ...], ...]}. A hit is {"document": {...}, "score": x} or the bare document; there may be fewer
    than asked."""

    def __init__(self, url: str, timeout: float = 60.0, retries: int = 6, wait: float = 0.5):
        self.url, self.timeout, self.retries, self.wait = url, timeout, retries, wait

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """As SqliteRetriever's, in one request. What fails is tried again up to `retries` times, each wait twice as
        long as the one before; in the end, and where the server refuses or answers something else, ConnectionError
        names the URL and what came back. A failure is never taken for an empty answer."""
        # without scores, the servers of Search-R1 fail, or unpack two results as one pair
        body = json.dumps({"queries": queries, "topk": k, "return_scores": True}).encode()
        request = Request(self.url, body, {"Content-Type": "application/json"})
        for attempt in range(self.retries + 1):
            try:
                with urlopen(request, timeout=self.timeout) as response:
                    answer = json.load(response)
                break
            except HTTPError as error:
                problem = f"status {error.code}: {error.read(300).decode(errors='replace')}"
                if error.code < 500 and error.code not in (408, 429):  # asking again will not help
                    raise ConnectionError(f"{self.url} refused the request with {problem}") from None
            except (OSError, HTTPException, ValueError) as error:
                problem = f"{type(error).__name__}: {error}"
            if attempt == self.retries:
                raise ConnectionError(f"{self.url} did not answer in {attempt + 1} tries; the last brought {problem}")
            time.sleep(self.wait * 2**attempt)
        try:
            results = [[passage_of(hit.get("document", hit)) for hit in hits[:k]] for hits in answer["result"]]
            if len(results) != len(queries):
                raise ValueError(f"{len(results)} results for {len(queries)} queries")
            return results
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ConnectionError(f"{self.url} did not answer as a retrieval server does ({error}): "
                                  f"{json.dumps(answer)[:300]}") from None


def serve(retriever: SqliteRetriever, port: int, host: str = "127.0.0.1") -> ThreadingHTTPServer:
    """A server of that protocol at http://host:port/retrieve, ready for `serve_forever`; port 0 takes a free one."""
    class Handler(BaseHTTPRequestHandler):
        """POST /retrieve, and nothing else."""
        protocol_version, timeout = "HTTP/1.1", 60

        def do_POST(self):
            try:
                size = int(self.headers["Content-Length"])
                asked = json.loads(self.rfile.read(size))
                queries, k = asked["queries"], asked.get("topk") or 3
                if self.path != "/retrieve" or not all(isinstance(q, str) for q in queries) or not 0 < k < 1000:
                    raise ValueError
                status, answer = 200, {"result": [[self.hit(asked, *found) for found in retriever.ranked(query, k)]
                                                  for query in queries]}
            except (ValueError, TypeError, KeyError, AttributeError):
                status, answer = 400, {"error": 'POST {"queries": [text, ...], "topk": n} to /retrieve'}
            body = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        @staticmethod
        def hit(asked, score, passage):
            document = {"contents": f'"{passage.title}"\n{passage.text}'}
            return {"document": document, "score": score} if asked.get("return_scores") else document

        def log_message(self, *args):
            """Quiet."""

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # many environments may ask at once
    return Server((host, port), Handler)


# ---- the search environment ------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Task:
    """k questions with the accepted answers (aliases) of each."""
    id: str
    questions: tuple[str, ...]
    answers: tuple[tuple[str, ...], ...]

    def __post_init__(self):
        if not self.questions or len(self.questions) != len(self.answers) or not all(self.answers):
            raise ValueError(f"task {self.id}: needs at least one question, and at least one answer for each")


def load_questions(path: str | os.PathLike) -> list[Task]:
    """A task for each question of a file: FlashRAG's JSONL (`id, question, golden_answers`; plain or .gz), HotpotQA's
    own JSON, or MEM1's parquet of single questions (needs pyarrow). A `;` in a question becomes a comma, since it joins
    questions. Raises ValueError naming the line (or entry) that holds no question, no answer, or an id seen before."""
    path, tasks, seen = os.fspath(path), [], {}
    for number, record in _records(path):
        where = f"{path}, {'line' if '.jsonl' in path else 'entry'} {number}"
        try:
            name, question, answers = _question(record)
        except (KeyError, TypeError) as error:
            raise ValueError(f"{where}: no question with an id and answers in this record ({error})") from None
        if not isinstance(question, str) or not question.strip():
            raise ValueError(f"{where}: the question is {question!r}")
        texts = isinstance(answers, list) and all(isinstance(a, str) for a in answers)
        if not texts or not any(map(normalize, answers)):
            raise ValueError(f"{where}: the answers must be a list of texts, one of them with a word, not {answers!r}")
        if name in seen:
            raise ValueError(f"{where}: id {name!r} is that of number {seen[name]} too")
        seen[name] = number
        tasks.append(Task(str(name), (question.strip().replace(";", ","),), (tuple(filter(normalize, answers)),)))
    if not tasks:
        raise ValueError(f"{path}: no questions in it")
    return tasks


def _question(record: dict) -> tuple:
    """(id, question, answers)."""
    if "golden_answers" in record:    # FlashRAG
        return record["id"], record["question"], record["golden_answers"]
    if "_id" in record:               # HotpotQA
        return record["_id"], record["question"], [record["answer"]]
    raise KeyError("neither golden_answers nor _id")


def _records(path: str, progress: bool = False) -> Iterator[tuple[int, dict]]:
    """(number from 1, record) of a JSONL, JSON or parquet file."""
    if path.endswith(".parquet"):
        try:
            from pyarrow import parquet
        except ImportError:
            raise ValueError(f"{path}: reading parquet needs pyarrow (pip install pyarrow)") from None
        yield from enumerate(parquet.read_table(path).to_pylist(), 1)
        return
    with (open(path, "rb") as raw, gzip.open(raw) if path.endswith(".gz") else raw as f,
          tqdm(total=os.path.getsize(path), unit="B", unit_scale=True, disable=not progress) as bar):
        if path.endswith(".json"):
            yield from enumerate(json.load(f), 1)
            return
        for number, line in enumerate(f, 1):
            if number % 1000 == 0:
                bar.update(raw.tell() - bar.n)
            try:
                record = json.loads(line)
                if not isinstance(record, dict):
                    raise ValueError("not an object")
            except ValueError as error:  # UnicodeDecodeError too
                raise ValueError(f"{path}, line {number}: not a JSON record ({error})") from None
            yield number, record


def load_passages(path: str | os.PathLike, progress: bool = False) -> Iterator[Passage]:
    """The passages of a wiki-18 JSONL file, plain or .gz, one at a time. Raises ValueError naming the line that is
    none."""
    for number, record in _records(os.fspath(path), progress):
        try:
            yield passage_of(record)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}, line {number}: {error}") from None


def compose(questions: list[Task], k: int, seed: int = 0) -> list[Task]:
    """Tasks of k questions each, none twice, out of all questions in a seeded order; fewer than k are left over. Raises
    ValueError where there is not one task."""
    shuffled = random.Random(f"compose {seed}").sample(questions, len(questions))
    if len(shuffled) < k:
        raise ValueError(f"{len(shuffled)} questions make no task of {k}")
    groups = [shuffled[i:i + k] for i in range(0, len(shuffled) - k + 1, k)]
    return [Task("+".join(t.id for t in group), sum((t.questions for t in group), ()),
                 sum((t.answers for t in group), ())) for group in groups]


class SearchEnv:
    """One episode of one task. reward: "em" or "f1", summed over the questions and given with the last call. An
    observation holds as many whole passages as `budget` allows, by `length` (words; or tokens, with a tokenizer's)."""

    def __init__(self, task: Task, retriever, reward: str = "em", top_k: int = 2, turns_per_question: int = 2,
                 budget: int | None = None, length: Callable[[str], int] = lambda text: len(text.split())):
        if reward not in ("em", "f1"):
            raise ValueError(f"reward must be 'em' or 'f1', not {reward!r}")
        self.task, self.retriever, self.reward, self.top_k = task, retriever, reward, top_k
        self.budget, self.length = budget, length
        self.turns_left = turns_per_question * len(task.questions) + 2  # the budget grows with the questions
        self.response = self.observation = ""                           # the newest of each: all that memory may keep
        self.answers: list[str] | None = None                           # None until the agent has answered

    def prompt(self) -> str:
        """The text of q: the protocol and the questions; it stays the same in every call."""
        return f"{PROTOCOL}\nQuestions : {' ; '.join(self.task.questions)}\n"

    def step(self, response: str) -> tuple[str, float, bool]:
        """Eq. 1: (o_t, r_t, d_t) = E(a_t)."""
        return step_all([self], [response])[0]

    def score(self, rule: str = "squad") -> tuple[float, float]:
        """(EM, F1) summed over the questions. Answer i belongs to question i; a missing one scores 0. To MEM1's rule
        nothing counts unless there are as many answers as questions."""
        if rule == "mem1" and len(self.answers or []) != len(self.task.questions):
            return 0.0, 0.0
        pairs = list(zip(self.answers or [], self.task.answers))
        return sum((exact_match(*p, rule) for p in pairs), 0.0), sum((token_f1(*p, rule) for p in pairs), 0.0)

    def query(self, response: str) -> str | None:
        """Read the action off a response: the query if it searches and may, else None: the episode is over."""
        self.response, self.turns_left = response, self.turns_left - 1
        found = ACTION.search(response)  # in the generated text only: the prompt shows the tags too
        if found and found[1] == "answer":
            self.answers = [answer.strip() for answer in found[2].split(";")]
        return found[2].strip() if found and found[1] == "search" and self.turns_left else None

    def observe(self, passages: list[Passage]) -> str:
        """The text of o_t."""
        hint = f"{self.turns_left} turns left" if self.turns_left > 1 else "last turn : answer now"
        for n in range(len(passages), -1, -1):  # what does not fit is left out whole, the last first
            body = " ".join(f"( {p.title} ) {p.text}" for p in passages[:n]) or (
                "what was found is too long" if passages else "nothing found")
            self.observation = f"\n<information> [ {hint} ] {body} </information>\n"
            if self.budget is None or self.length(self.observation) <= self.budget:
                break
        return self.observation


def step_all(envs: list[SearchEnv], responses: list[str]) -> list[tuple[str, float, bool]]:
    """Eq. 1 for all live environments at once, with one batched retrieval. A malformed response (no search, no answer)
    or a search on the last turn ends the episode with reward 0."""
    queries = [env.query(response) for env, response in zip(envs, responses, strict=True)]
    searching = [i for i, query in enumerate(queries) if query is not None]
    found = {}
    for retriever, top_k in dict.fromkeys((envs[i].retriever, envs[i].top_k) for i in searching):
        mine = [i for i in searching if (envs[i].retriever, envs[i].top_k) == (retriever, top_k)]
        found |= zip(mine, retriever.search([queries[i] for i in mine], top_k), strict=True)
    return [(env.observe(found[i]), 0.0, False) if i in found else ("", env.score()[env.reward == "f1"], True)
            for i, env in enumerate(envs)]


# ---- an invented encyclopedia ----------------------------------------------------------------------------------------

def _names(n: int) -> list[str]:
    """n invented names, the same in every world."""
    rng, names = random.Random(0), {}
    while len(names) < n:
        syllables = (rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(rng.choice((2, 2, 3))))
        names["".join(syllables).title()] = None
    return list(names)


_NAMES = _names(220)
ENTITIES = {"person": _NAMES[:120], "town": _NAMES[120:180], "river": _NAMES[180:],
            "craft": [f"{what} {who}" for what in ("glass", "salt", "silk", "iron", "honey")
                      for who in ("maker", "trader", "painter", "keeper")]}
RELATIONS = {"home": ("person", "town"), "teacher": ("person", "person"), "craft": ("person", "craft"),
             "river": ("town", "river"), "mayor": ("town", "person")}


class ToyWiki:
    """An invented encyclopedia: who lives where, learns from whom and does what. The names are the same for every seed,
    the facts are not: a model can learn to read, and never to know. Names stand alone between spaces in every text, so
    that each has the same tokens everywhere and copying is one circuit instead of a map for every name."""

    def __init__(self, seed: int | str):
        rng = random.Random(f"world {seed}")
        self.seed = seed
        self.facts = {(relation, entity): rng.choice([v for v in ENTITIES[values] if v != entity])
                      for relation, (kind, values) in RELATIONS.items() for entity in ENTITIES[kind]}
        self.passages = []
        for kind in ("person", "town"):
            relations = [r for r, (of, _) in RELATIONS.items() if of == kind]
            for e in ENTITIES[kind]:
                self.passages.append(Passage(e, " ".join(f"{r} of {e} is {self.facts[r, e]} ." for r in relations)))
        for town in ENTITIES["town"]:  # distractors: they name people, towns and rivers and answer nothing
            a, b = rng.sample(ENTITIES["person"], 2)
            self.passages.append(Passage(rng.choice(ENTITIES["river"]), f"{a} met {b} near {town} ."))
        rng.shuffle(self.passages)
        self.retriever = SqliteRetriever(self.passages)

    def tasks(self, n: int, k: int) -> list[Task]:
        """n tasks of k questions each, of one hop or two; no entity and no answer twice in a task. Raises ValueError
        where the world has no k such questions."""
        rng = random.Random(f"tasks {self.seed} {k}")
        return [self._task(f"world-{self.seed}-q{k}-{i}", k, rng) for i in range(n)]

    def _task(self, name: str, k: int, rng: random.Random) -> Task:
        chosen, used, facts = {}, set(), list(self.facts)
        for _ in range(1000 * k):  # a world has only so many names
            if len(chosen) == k:
                break
            relation, entity = rng.choice(facts)
            question, path = f"{relation} of {entity}", {entity, self.facts[relation, entity]}
            onward = [r for r, (kind, _) in RELATIONS.items() if kind == RELATIONS[relation][1]]
            answer = self.facts[relation, entity]
            if onward and rng.random() < 0.5:
                outer = rng.choice(onward)
                question, answer = f"{outer} of {question}", self.facts[outer, answer]
            if not (path | {answer}) & used:
                chosen[question] = (answer,)
                used |= path | {answer}
        if len(chosen) < k:
            raise ValueError(f"no {k} questions without a name in common were found in this world; ask for fewer")
        return Task(name, tuple(chosen), tuple(chosen.values()))

    @staticmethod
    def expert(env: SearchEnv) -> str:
        """The scripted expert's next response, read off its last response and the observation alone: it is a compact-
        memory agent itself, and shows that this state suffices."""
        known, note, question = [], "", ""
        if env.response:
            layout = r"known (.*?)next (.*) </think> <search> (.*) </search>"
            memory, question, query = re.search(layout, env.response).groups()
            known = memory.split(" ; ")[:-1]
            value = re.search(rf"\b{query} is (.*?) \.", env.observation)[1]
            note = f"{query} is {value} ; "
            if question.endswith(f" of {query}"):  # the first of two hops: its value is the entity of the second
                query = question.removesuffix(query) + value
            else:
                known, question = [*known, value], ""
        if not question and len(known) < len(env.task.questions):
            question = env.task.questions[len(known)]
            query = " of ".join(question.split(" of ")[-2:])
        memory = f"<think> {note}known " + "".join(f"{value} ; " for value in known)
        if not question:
            return f"{memory}done </think> <answer> {' ; '.join(known)} </answer>"
        return f"{memory}next {question} </think> <search> {query} </search>"


def toy_envs(split: str, n: int, k: int, seed: int = 0, **settings) -> list[SearchEnv]:
    """n fresh episodes of k questions each, from up to 8 worlds, whose facts differ for every split and seed."""
    worlds = [ToyWiki(f"{split}-{seed}-{w}") for w in range(min(n, 8))]
    return [SearchEnv(task, world.retriever, **settings)
            for w, world in enumerate(worlds) for task in world.tasks(len(range(w, n, len(worlds))), k)]


def demo():
    """One episode of the expert on a two-question task."""
    (env,), done = toy_envs("train", 1, k=2), False
    print(f"the answers are {env.task.answers}\n\nq:\n{env.prompt()}")
    for turn in range(99):
        response = ToyWiki.expert(env)
        observation, reward, done = env.step(response)
        print(f"a_{turn}: {response}\no_{turn}: {observation.strip()}   r_{turn} = {reward:g}\n")
        if done:
            break
    print("EM {:g}, F1 {:g}, summed over {} questions".format(*env.score(), len(env.task.questions)))


def recall(retriever, hotpotqa: str | os.PathLike) -> str:
    """How many of the passages that HotpotQA's own JSON names for a question are among the first 3 and 10 that the
    question finds, and the time of a query."""
    found, seconds = {3: [], 10: []}, []
    for _, record in _records(os.fspath(hotpotqa)):
        if "supporting_facts" not in record:
            raise ValueError(f"{os.fspath(hotpotqa)}: recall needs HotpotQA's own JSON, with supporting_facts")
        gold, start = {title for title, _ in record["supporting_facts"]}, time.perf_counter()
        (passages,) = retriever.search([record["question"]], 10)
        seconds.append(time.perf_counter() - start)
        for k in found:
            found[k] += [title in {p.title for p in passages[:k]} for title in gold]
    seconds.sort()
    p50, p99 = (1000 * seconds[int(share * len(seconds))] for share in (0.5, 0.99))
    return (f"{len(seconds)} questions: recall@3 {fmean(found[3]):.1%}, recall@10 {fmean(found[10]):.1%}, "
            f"p50 {p50:.0f} ms, p99 {p99:.0f} ms")


def open_retriever(corpus: str):
    """A server's URL, a JSONL file of passages (read into memory), or an index on disk."""
    if corpus.startswith(("http://", "https://")):
        return HttpRetriever(corpus)
    return SqliteRetriever(load_passages(corpus)) if ".jsonl" in corpus else SqliteRetriever(index=corpus)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command")
    index = commands.add_parser("index", help="make an index on disk")
    index.add_argument("corpus", help="JSONL, plain or .gz, a passage a line: contents, or title and text")
    index.add_argument("index", help="the file to write; it appears when it is whole")
    server = commands.add_parser("serve", help="answer POST /retrieve from an index")
    server.add_argument("index", help="what `index` wrote")
    server.add_argument("--port", type=int, default=8000)
    server.add_argument("--host", default="127.0.0.1", help="the address to listen at (default: this machine alone)")
    measure = commands.add_parser("recall", help="recall and time of an index, on HotpotQA's questions")
    measure.add_argument("index", help="an index, a JSONL of passages, or a server's URL")
    measure.add_argument("hotpotqa", help="HotpotQA's own JSON")
    measure.add_argument("--all_words", action="store_true", help="let common words count too, whatever they cost")
    args = parser.parse_args()
    try:
        if args.command == "index":
            build_index(args.corpus, args.index)
        elif args.command == "recall":
            SqliteRetriever.POSTINGS = 10**12 if args.all_words else SqliteRetriever.POSTINGS
            print(recall(open_retriever(args.index), args.hotpotqa))
        elif args.command == "serve":
            with serve(SqliteRetriever(index=args.index), args.port, args.host) as httpd:
                print(f"http://{args.host}:{httpd.server_port}/retrieve", flush=True)
                httpd.serve_forever()
        else:
            demo()
    except (ValueError, OSError, sqlite3.Error) as error:
        raise SystemExit(f"env.py: {error}") from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None


if __name__ == "__main__":
    main()
