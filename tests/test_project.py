"""The shape of the project: arrows, leaves, equations, and READMEs that are true."""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parent.parent
FILES = ["env", "rollout", "pack", "losses", "rce", "eval", "train"]
MEASURES = sorted(path.stem for path in (ROOT / "experiments").glob("*.py"))
ARROWS = {
    "env": set(),
    "rollout": set(),
    "pack": set(),
    "losses": set(),
    "rce": {"pack", "rollout"},
    "eval": {"env", "rollout"},
    "train": {"env", "rollout", "pack", "losses", "rce", "eval"},
}
EQUATIONS = {"rollout": [1, 2], "pack": [3, 4, 6], "rce": [5], "losses": [7, 8, 9, 10, 11]}
PACKAGES = {"torch", "transformers", "tqdm", "tokenizers"}  # tokenizers comes with transformers
DOCUMENTS = ["README.md", "experiments/README.md"]


def source(name):
    return (ROOT / f"{name}.py").read_text()


def document(name):
    return (ROOT / name).read_text()


def imported(name):
    """The top-level modules that a file imports, anywhere in it."""
    modules = set()
    for node in ast.walk(ast.parse(source(name))):
        if isinstance(node, ast.Import):
            modules |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            modules.add(node.module.split(".")[0])
    return modules


@pytest.mark.parametrize("name", FILES)
def test_imports_are_the_arrows_of_the_design(name):
    """Leaves stay leaves, what measures is never needed, and nothing beyond the three packages
    is."""
    modules = imported(name)
    assert modules & {*FILES, "experiments"} == ARROWS[name]
    outside = modules - set(FILES) - set(sys.stdlib_module_names)
    # pyarrow only where a parquet file is read, peft where a folder of adapters is
    own = {"env": {"tqdm", "pyarrow"}, "losses": {"torch"}, "rollout": PACKAGES | {"peft"}}
    assert outside <= own.get(name, PACKAGES)


@pytest.mark.parametrize("name", MEASURES)
def test_experiments_need_no_more(name):
    """matplotlib only where a picture is drawn."""
    outside = imported(f"experiments/{name}") - {*FILES, "experiments"}
    outside -= set(sys.stdlib_module_names)
    assert outside <= PACKAGES | ({"matplotlib"} if name in ("study", "plot") else set())


def test_top_level_is_seven_files():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    files = tracked.stdout.split()
    if not files:
        pytest.skip("not a git checkout")
    python = sorted(f for f in files if f.endswith(".py") and "/" not in f)
    assert python == sorted(f"{name}.py" for name in FILES)
    assert {f.split("/")[0] for f in files if "/" in f} <= {".ci", "experiments", "tests"}


@pytest.mark.parametrize("name", ["env", "rollout", "pack", "losses"])
def test_a_leaf_copied_alone_works(name, tmp_path):
    """One file is the whole cost of reusing a concept: it is imported, and its demo runs, where
    nothing else is. (losses.py is formulas alone and prints nothing.)"""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    command = [sys.executable, f"{name}.py"]
    out = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert name == "losses" or len(out.stdout.splitlines()) > 5


@pytest.mark.parametrize("name, numbers", EQUATIONS.items())
def test_equations_are_cited_where_they_are_implemented(name, numbers):
    """In the code or the docstring of a function, not in the header alone."""
    body, cited = source(name).split('"""', 2)[2], set()
    for text in re.findall(r"Eq\. ([\d, and]+)", body):
        cited |= set(map(int, re.findall(r"\d+", text)))
    for first, last in re.findall(r"Eq\. (\d+)-(\d+)", body):
        cited |= set(range(int(first), int(last) + 1))
    assert set(numbers) <= cited


def test_train_is_six_numbered_paragraphs_with_their_equations():
    paragraphs = re.findall(r"# (\d)\. (.*)", source("train").split("def train(")[1])
    assert [number for number, _ in paragraphs] == list("123456")
    for (_, text), equations in zip(paragraphs, ([1], [4, 6], [], [5], [8, 9], [7, 10, 11])):
        assert all(re.search(rf"\b{e}\b", text) for e in equations), text


def test_the_loop_comes_first():
    """Before line 200; all that is read with the paper stands above the line that says so."""
    lines = source("train").splitlines()
    loop = next(i for i, line in enumerate(lines) if line.startswith("    for step in"))
    plumbing = next(i for i, line in enumerate(lines) if "plumbing: read last" in line)
    assert loop < 200 < plumbing <= 440
    parts = "roll_out pack_calls score audit advantages_of update_policy".split()
    places = [lines.index(next(x for x in lines if x.startswith(f"def {p}("))) for p in parts]
    assert places == sorted(places) and loop < places[0] and places[-1] < plumbing


@pytest.mark.parametrize("name", FILES + [f"experiments/{name}" for name in MEASURES])
def test_public_functions_say_what_they_do(name):
    """A docstring on every public function, method and class; `main` and short accessors excepted;
    no line over 100 columns, no comprehension in another."""
    tree = ast.parse(source(name))
    comprehensions = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
    for node in ast.walk(tree):
        if isinstance(node, comprehensions):
            inner = [n for n in ast.walk(node) if isinstance(n, comprehensions)]
            assert inner == [node], f"{name}, line {node.lineno}"
    public = list(tree.body)
    for node in tree.body:
        public += node.body if isinstance(node, ast.ClassDef) else []
    for node in public:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name.startswith("_"):
            continue
        short = node.end_lineno - node.lineno < 4
        free = short or node.name in ("main", "forward", "backward")
        assert free or ast.get_docstring(node), f"{name}.{node.name}"
    assert max(map(len, source(name).splitlines())) <= 100


def test_packaging_installs_three_packages_and_no_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [re.split(r"[<>=]", d)[0] for d in project["project"]["dependencies"]]
    assert names == ["torch", "transformers", "tqdm"]
    assert project["tool"]["setuptools"]["py-modules"] == []
    assert "packages" not in project["tool"]["setuptools"]


def test_readme_is_true():
    """Its picture is drawn by the code, its arrows are those of the files, and each document knows
    every flag, file and picture that it names."""
    from pack import draw, example
    from train import Config

    readme = document("README.md")
    assert draw(*example()) in readme
    for name in FILES:
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}.py`"))
        assert set(re.findall(r"`(\w+)`", row.split("|")[4])) == ARROWS[name], row
    known = set(Config.__dataclass_fields__)
    for file in FILES + [f"experiments/{name}" for name in MEASURES]:
        known |= set(re.findall(r'"--(\w+)"', source(file)))
        known |= set(re.findall(r'\("(\w+)", [\d_]+\)', source(file)))  # sizes of a benchmark
        known |= set(re.findall(r'"(\w+)": [\d_]+', source(file)))
    known |= {"help", "repo", "include", "local", "standalone", "nproc"}  # of hf, torchrun
    known |= {"dist", "nnodes", "rdzv", "small"}  # of pytest, torchrun, gpu.sh
    for name in DOCUMENTS:
        assert set(re.findall(r"--(\w+)", document(name))) - known == set(), name
        pictures = re.findall(r"!\[.*?\]\((.*?)\)", document(name))
        links = re.findall(r"[^!]\[.*?\]\((\w.*?)\)", document(name))
        assert links or name != "README.md"
        for path in pictures + links:
            assert ((ROOT / name).parent / path).is_file(), path
    assert "README.md" in (ROOT / ".ci/run").read_text()


def test_readme_names_what_is_there():
    """Every `name` beside a file in the tables of README is defined in that file."""
    readme = document("README.md")
    for file, names in re.findall(r"`(\w+)\.py`: ((?:`\w+`(?:, )?)+)", readme):
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^(def|class) {name}\b", source(file), re.M), (file, name)
    for name, file in re.findall(r"`(\w+)` (?:in|of) (\w+)\.py", readme):
        assert re.search(rf"\b{name}\b", source(file)), (file, name)
    assert len(readme.splitlines()) <= 260


def test_documents_show_the_study_as_its_files_have_it(monkeypatch):
    """Every table of a committed study is what the command beside it prints, from the files
    alone."""
    from experiments import study

    text = document("experiments/README.md")
    joined = text.replace("\\\n", "")
    commands = re.findall(r"experiments\.study (.*--folder experiments/results/.*)$", joined, re.M)
    folders = [f for f in (ROOT / "experiments/results").iterdir() if f.is_dir()]
    assert len(commands) == len(folders)
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(study, "make_run", None)  # nothing is run
    for command in commands:
        for table in "\n".join(study.study(command.split())).split("\n\n"):
            assert table in text, command
    first = "\n".join(study.study(commands[0].split())).split("\n\n")[0]
    assert first in document("README.md")


def blocks(name):
    return re.findall(r"```python\n(.*?)```", document(name), re.DOTALL)


def test_the_block_for_an_engine_is_a_sample_for_rollout(monkeypatch):
    """With a stand-in for the engine: ids and the sampled ids' log-probs, row by row."""
    (code,) = [code for code in blocks("experiments/README.md") if "vllm" in code]
    done, number = [], SimpleNamespace

    class LLM:
        def __init__(self, path, logprobs_mode):
            done.append(path)

        def collective_rpc(self, name, kwargs):
            done.append(kwargs["weights_path"])

        def generate(self, prompts, params):
            assert params["logprobs"] == 0 and params["stop"] == ["</x>"]
            assert params["include_stop_str_in_output"]
            answers = []
            for prompt in prompts:
                n = len(prompt["prompt_token_ids"])
                logprobs = [{n: number(logprob=-n)}, {7: number(logprob=-7)}]
                answers.append(number(outputs=[number(token_ids=(n, 7), logprobs=logprobs)]))
            return answers

    monkeypatch.setitem(sys.modules, "vllm", number(LLM=LLM, SamplingParams=dict))
    names = {
        "run": Path("r"),
        "T": 1.0,
        "config": number(max_new_tokens=9),
        "SearchEnv": number(stop=("</x>",)),
    }
    names |= {"save": lambda *args: done.append("saved"), "student": None, "tokenizer": None}
    exec(code, names)
    names["new_weights"]()
    assert names["sample"]([[5], [5, 6]], [0, 1]) == ([[1, 7], [2, 7]], [[-1, -7], [-2, -7]])
    assert done == ["r/student", "saved", "r/student"]


def test_readme_s_copied_module_runs(tmp_path):
    """The block that people copy, on a tiny model instead of the run's. (test_custom.py runs the
    other.)"""
    from test_rce import TOKENIZER
    from tiny import tiny

    tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    (code,) = [code for code in blocks("README.md") if "runs/tiny/student" in code]
    code = code.replace("runs/tiny/student", str(tmp_path / "model"))
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stderr
    assert "tensor([0, 0, 1])" in out.stdout
