"""The environment E of Eq. 1: search tasks with compact memory, their retriever and their scores (Section 4.1).

One example joins k questions; at each turn the agent writes its memory and then either one search or all answers:

    q    = protocol + "Questions : q1 ; q2"
    a_t  = <think> memory </think> <search> query </search>      or  ... <answer> a1 ; a2 </answer>
    o_t  = <information> [ n turns left ] passages </information>

`SearchEnv` speaks this protocol, `SqliteRetriever` finds passages (BM25), `ToyWiki` invents an encyclopedia with
questions and a scripted expert, so that everything runs offline. Standard library only; no model, no token ids.

    python env.py        # one episode of the expert, as text
"""
import json
import os
import random
import re
import sqlite3
import string
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

PROTOCOL = (
    "Answer all the questions . At every turn you see only this text , your last response and the passages that it "
    "found . First write <think> all that you know so far , and what is next </think> . Then write either <search> one "
    "query </search> or , when nothing is open , <answer> all answers , joined by ; </answer> .")
ACTION = re.compile(r"<(search|answer)>(.*?)</\1>", re.DOTALL)
STOP = ("</search>", "</answer>")  # a response ends with one of these


# ---- scores ----------------------------------------------------------------------------------------------------------

def normalize(text: str) -> str:
    """SQuAD's normal form: lower case, no punctuation, no articles, single spaces."""
    text = "".join(c for c in text.lower() if c not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def exact_match(prediction: str, answers: tuple[str, ...]) -> float:
    """1.0 if the prediction equals any of the aliases `answers` in normal form, else 0.0."""
    return float(any(normalize(prediction) == normalize(a) for a in answers))


def token_f1(prediction: str, answers: tuple[str, ...]) -> float:
    """Token F1 of SQuAD (repeated tokens count as often as they occur), maximum over the aliases."""
    return max(_f1(normalize(prediction).split(), normalize(a).split()) for a in answers)


def _f1(predicted: list[str], gold: list[str]) -> float:
    if not predicted or not gold:
        return float(predicted == gold)
    same = sum((Counter(predicted) & Counter(gold)).values())
    return 2 * same / (len(predicted) + len(gold))


# ---- retrieval -------------------------------------------------------------------------------------------------------

@dataclass(frozen=True)
class Passage:
    title: str
    text: str


class SqliteRetriever:
    """BM25 over passages, in SQLite's FTS5, in memory."""

    MAX_WORDS = 64  # FTS5 fails on much longer queries, and no good one has more

    def __init__(self, passages: Iterable[Passage]):
        self.db = sqlite3.connect(":memory:")
        with self.db:
            self.db.execute("CREATE VIRTUAL TABLE passage USING fts5(title, text)")
            self.db.executemany("INSERT INTO passage VALUES (?, ?)", ((p.title, p.text) for p in passages))

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """The k best passages for each query, best first; none where no word of it occurs. Any text is legal: its first
        MAX_WORDS distinct words count, each quoted, so that FTS5 sees none of its operators in them."""
        return [self._search(query, k) for query in queries]

    def _search(self, query: str, k: int) -> list[Passage]:
        words = list(dict.fromkeys(re.findall(r"\w+", query)))[:self.MAX_WORDS]
        if not words:
            return []
        match = " OR ".join(f'"{word}"' for word in words)
        best = "SELECT title, text FROM passage WHERE passage MATCH ? ORDER BY rank, rowid LIMIT ?"
        return [Passage(*row) for row in self.db.execute(best, (match, k))]


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
    """The questions of a FlashRAG JSONL file (`id, question, golden_answers`), a task each. Raises ValueError naming
    the line that is none."""
    return [Task(str(record["id"]), (record["question"],), (tuple(record["golden_answers"]),))
            for record in _records(path, "id", "question", "golden_answers")]


def load_passages(path: str | os.PathLike) -> Iterator[Passage]:
    """The passages of a wiki-18 JSONL file (`contents` = quoted title, newline, text). Raises ValueError naming the
    line that is none."""
    for record in _records(path, "contents"):
        title, _, text = record["contents"].partition("\n")
        yield Passage(title.removeprefix('"').removesuffix('"'), text)


def _records(path: str | os.PathLike, *names: str) -> Iterator[dict]:
    with open(path, encoding="utf-8") as f:
        for number, line in enumerate(f, 1):
            try:
                record = json.loads(line)
                for name in names:
                    record[name]
            except (ValueError, KeyError, TypeError) as error:
                where = f"{os.fspath(path)}, line {number}"
                raise ValueError(f"{where}: no record with {', '.join(names)} ({error})") from None
            yield record


class SearchEnv:
    """One episode of one task. reward: "em" or "f1", summed over the questions and given with the last call."""

    def __init__(self, task: Task, retriever, reward: str = "em", top_k: int = 2, turns_per_question: int = 2):
        if reward not in ("em", "f1"):
            raise ValueError(f"reward must be 'em' or 'f1', not {reward!r}")
        self.task, self.retriever, self.reward, self.top_k = task, retriever, reward, top_k
        self.turns_left = turns_per_question * len(task.questions) + 2  # the budget grows with the questions
        self.response = self.observation = ""                           # the newest of each: all that memory may keep
        self.answers: list[str] | None = None                           # None until the agent has answered

    def prompt(self) -> str:
        """The text of q: the protocol and the questions; it stays the same in every call."""
        return f"{PROTOCOL}\nQuestions : {' ; '.join(self.task.questions)}\n"

    def step(self, response: str) -> tuple[str, float, bool]:
        """Eq. 1: (o_t, r_t, d_t) = E(a_t)."""
        return step_all([self], [response])[0]

    def score(self) -> tuple[float, float]:
        """(EM, F1) summed over the questions. Answer i belongs to question i; a missing one scores 0."""
        pairs = list(zip(self.answers or [], self.task.answers))
        return sum((exact_match(*p) for p in pairs), 0.0), sum((token_f1(*p) for p in pairs), 0.0)

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
        body = " ".join(f"( {p.title} ) {p.text}" for p in passages) or "nothing found"
        self.observation = f"\n<information> [ {hint} ] {body} </information>\n"
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


def main():
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


if __name__ == "__main__":
    main()
