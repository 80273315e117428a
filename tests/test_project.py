"""The shape of the project: arrows, leaves, equations, and a README that is true."""

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
ARROWS = {
    "env": set(),
    "rollout": set(),
    "pack": set(),
    "losses": set(),
    "rce": {"pack", "rollout", "env"},
    "eval": {"env", "rollout"},
    "train": {"env", "rollout", "pack", "losses", "rce", "eval"},
}
EQUATIONS = {"rollout": [1, 2], "pack": [3, 4, 6], "rce": [5], "losses": [7, 8, 9, 10, 11]}
PACKAGES = {"torch", "transformers", "tqdm", "tokenizers"}  # tokenizers comes with transformers


def source(name):
    return (ROOT / f"{name}.py").read_text()


def imported(name):
    modules = set()
    for node in ast.walk(ast.parse(source(name))):
        modules |= {a.name.split(".")[0] for a in node.names} if isinstance(node, ast.Import) else set()
        modules |= {node.module.split(".")[0]} if isinstance(node, ast.ImportFrom) else set()
    return modules


@pytest.mark.parametrize("name", FILES)
def test_imports_are_the_arrows_of_the_design(name):
    """Leaves stay leaves, and nothing beyond the three packages is needed."""
    modules = imported(name)
    assert modules & set(FILES) == ARROWS[name]
    outside = modules - set(FILES) - set(sys.stdlib_module_names)
    # pyarrow only where a parquet file is read, matplotlib where a picture is drawn
    own = {"env": {"tqdm", "pyarrow"}, "losses": {"torch"}, "eval": PACKAGES | {"matplotlib"}}
    assert outside <= own.get(name, PACKAGES)


def test_top_level_is_seven_files():
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    assert sorted(f for f in tracked if f.endswith(".py") and "/" not in f) == sorted(
        f"{n}.py" for n in FILES
    )


@pytest.mark.parametrize("name", ["env", "rollout", "pack", "losses"])
def test_a_leaf_copied_alone_works(name, tmp_path):
    """One file is the whole cost of reusing a concept: its demo runs where nothing else is."""
    shutil.copy(ROOT / f"{name}.py", tmp_path)
    out = subprocess.run([sys.executable, f"{name}.py"], cwd=tmp_path, capture_output=True, text=True)
    assert out.returncode == 0 and len(out.stdout.splitlines()) > 5, out.stderr


@pytest.mark.parametrize("name, numbers", EQUATIONS.items())
def test_equations_are_cited_where_they_are_implemented(name, numbers):
    """In the code or the docstring of a function, not in the header alone."""
    body = source(name).split('"""', 2)[2]
    cited = {n for text in re.findall(r"Eq\. ([\d, and]+)", body) for n in map(int, re.findall(r"\d+", text))}
    cited |= {n for a, b in re.findall(r"Eq\. (\d+)-(\d+)", body) for n in range(int(a), int(b) + 1)}
    assert set(numbers) <= cited


def test_train_is_six_numbered_paragraphs_with_their_equations():
    paragraphs = re.findall(r"# (\d)\. (.*)", source("train").split("def train(")[1])
    assert [number for number, _ in paragraphs] == list("123456")
    for (_, text), equations in zip(paragraphs, ([1], [4, 6], [5], [], [8, 9], [7, 10, 11])):
        assert all(re.search(rf"\b{e}\b", text) for e in equations), text


@pytest.mark.parametrize("name", FILES)
def test_public_functions_say_what_they_do(name):
    """A docstring on every public function, method and class; `main` and one-line accessors excepted; no line
    over 120 columns."""
    for node in ast.walk(ast.parse(source(name))):
        if (
            isinstance(node, (ast.FunctionDef, ast.ClassDef))
            and not node.name.startswith("_")
            and node.col_offset in (0, 4)
        ):
            short = node.end_lineno - node.lineno < 4
            assert short or node.name in ("main", "forward", "backward") or ast.get_docstring(node), (
                f"{name}.{node.name}"
            )
    assert max(map(len, source(name).splitlines())) <= 120


def test_packaging_installs_three_packages_and_no_module():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    names = [re.split(r"[<>=]", d)[0] for d in project["project"]["dependencies"]]
    assert names == ["torch", "transformers", "tqdm"] and project["tool"]["setuptools"]["py-modules"] == []
    assert "packages" not in project["tool"]["setuptools"]


def test_readme_is_true():
    """Its picture is drawn by the code, its line counts and arrows are those of the files, and it knows every
    flag that it names."""
    from pack import draw, example
    from train import Config

    readme = (ROOT / "README.md").read_text()
    assert draw(*example()) in readme
    for name in FILES:
        row = next(line for line in readme.splitlines() if line.startswith(f"| `{name}.py`"))
        cells = [c.strip() for c in row.strip("|").split("|")]
        assert int(cells[3]) == len(source(name).splitlines()), row
        assert set(re.findall(r"`(\w+)`", cells[4])) == ARROWS[name], row
    flags = r'"--(\w+)"|\("(\w+)", [\d_]+\)'  # of argparse, and the sizes that the benchmarks list
    known = set(Config.__dataclass_fields__) | {
        name for file in FILES for pair in re.findall(flags, source(file)) for name in pair
    }
    theirs = {"branch", "include", "local", "repo", "standalone", "nproc"}  # of git, hf and torchrun
    assert set(re.findall(r"--(\w+)", readme)) - known <= {"no_whiten_advantages", "help"} | theirs
    ci = (ROOT / ".ci/run").read_text()
    assert "README.md" in ci


def test_readme_shows_the_study_as_its_files_have_it(monkeypatch):
    """Every table of a committed study is what the command beside it prints, from the files alone."""
    import eval as eval_file

    readme = (ROOT / "README.md").read_text()
    commands = re.findall(r"^python eval\.py study (.*--folder assets/.*)$", readme.replace("\\\n", ""), re.M)
    assert len(commands) == len([f for f in (ROOT / "assets").iterdir() if f.is_dir()])
    assert all((ROOT / picture).is_file() for picture in re.findall(r"!\[.*?\]\((.*?)\)", readme))
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(eval_file, "python", None)  # nothing is run
    for command in commands:
        for table in "\n".join(eval_file.study(command.split())).split("\n\n"):
            assert table in readme, command


def readme_blocks():
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_readme_engine_is_a_sample_for_rollout(monkeypatch):
    """The block for a faster engine, with a stand-in for the engine: ids and the sampled ids' log-probs, row by row."""
    (code,) = [code for code in readme_blocks() if "vllm" in code]
    done, number = [], SimpleNamespace

    class LLM:
        def __init__(self, path, logprobs_mode):
            done.append(path)

        def collective_rpc(self, name, kwargs):
            done.append(kwargs["weights_path"])

        def generate(self, prompts, params):
            assert (
                params["logprobs"] == 0
                and params["include_stop_str_in_output"]
                and params["stop"] == ["</x>"]
            )
            return [
                number(
                    outputs=[
                        number(token_ids=(n, 7), logprobs=[{n: number(logprob=-n)}, {7: number(logprob=-7)}])
                    ]
                )
                for n in (len(p["prompt_token_ids"]) for p in prompts)
            ]

    monkeypatch.setitem(sys.modules, "vllm", number(LLM=LLM, SamplingParams=dict))
    names = {"run": Path("r"), "T": 1.0, "config": number(max_new_tokens=9), "STOP": ("</x>",)}
    names |= {"save": lambda *args: done.append("saved"), "student": None, "tokenizer": None}
    exec(code, names)
    assert names["sample"]([[5], [5, 6]], [0, 1]) == ([[1, 7], [2, 7]], [[-1, -7], [-2, -7]])
    assert done == ["r/student", "saved", "r/student"]


def test_readme_examples_run(tmp_path):
    """The blocks that people copy, on a tiny model in the place of the run's; none over 30 lines."""
    from test_rce import TOKENIZER
    from tiny import tiny

    tiny("llama", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "model")
    TOKENIZER.save_pretrained(tmp_path / "model")
    outputs = []
    for code in readme_blocks():
        if "vllm" in code:
            continue
        assert "runs/tiny/student" in code and len(code.splitlines()) <= 30
        code = code.replace("runs/tiny/student", str(tmp_path / "model"))
        out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert out.returncode == 0, out.stderr
        outputs.append(out.stdout)
    copy, own = sorted(outputs, key=lambda out: "from 0" in out)
    assert "tensor([0, 0, 1])" in copy
    ids = [len(TOKENIZER.encode(f" ({n}) ", add_special_tokens=False)) for n in (1, 2, 6, 7)]
    for start, (a, b), line in zip((0, 5), (ids[:2], ids[2:]), own.splitlines(), strict=True):
        assert line.startswith(
            f"from {start} [0, {a}, {a + b}] "
        )  # what two observations leave in each context
