"""Count phrases that make text read like a translation, per 10,000 words; docs/design/house.md has the goals.

    python -m benchmarks.prose                    # docstrings and comments, messages and documents of this checkout
    python -m benchmarks.prose --sample 30 --seed 7   # random docstrings and messages, to be read without the code
    python -m benchmarks.prose OTHER/checkout     # docstrings, comments and documents of any Python project

These kinds of text are counted separately:
1. docstrings and comments in the packages and, in a separate column, in the tests;
2. messages: string literals inside `raise`, `log(…)`, `print(…)` and calls with `help=`;
3. documents: Markdown without its code blocks.

The counts are symptoms. A low count does not make a text clear; a high one shows where to look.
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("models", "data", "pipeline", "jobs")
LEAST_WORDS = 5  # of a message in a sample
PER_WORDS = 10_000
# Each is one row of the table: what is counted, and the goal per 10,000 words.
TURNS = {
    '"where" as a condition': (
        r"\bwhere (?:it|there|this|that|they|no|nothing|a|an|the|one|its|all|some|each)\b",
        "≤ 3",
    ),
    '"if"': (r"\bif\b", "15 to 50"),
    '"that is, are, has, have, was, were"': (r"\bthat (?:is|are|has|have|was|were)\b", "≤ 10"),
    '"beside"': (r"\bbeside\b", "≤ 0.5"),
    '"behind"': (r"\bbehind\b", "≤ 0.5"),
    '"goes on, go on"': (r"\b(?:goes|go|going|went|gone) on\b", "≤ 0.5"),
    '"is asked, are asked"': (r"\b(?:is|are|was|were) asked\b", "≤ 0.5"),
    'sentences that begin with "Of a"': (r"(?:^|[.:;!?]\s+)Of (?:a|an|the|all|each|those|these|several|two|it)\b", "0"),
}
SPEAKING_CALLS = ("log", "print", "echo", "warning", "info", "error", "show", "require")


@dataclass(frozen=True)
class Text:
    """A docstring, a block of comments, a message or a paragraph of a document."""

    place: str  # "data/order.py:12"
    words: str


# ------------------------------------------------------------------------ texts


def docstrings(path: Path, tree: ast.Module, shown: Callable[[str], str] | None = None) -> Iterator[Text]:
    """Yield the docstrings of a module, its classes and its functions; by default without names from code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text:
                # Not cleaned: if only examples follow the first line, that would remove their indentation.
                margin = " " * node.body[0].col_offset
                lines = [line.removeprefix(margin) for line in text.splitlines()]
                yield Text(f"{path}:{getattr(node, 'lineno', 1)}", (shown or without_code)("\n".join(lines)))


def comments(path: Path, source: str) -> Iterator[Text]:
    """Yield comments; a comment after code is one text, and so is a block of consecutive comment lines."""
    lines: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        number = token.start[0]
        follows_code = bool(token.line[: token.start[1]].strip())
        if lines and (number != last + 1 or follows_code):
            yield Text(f"{path}:{first}", " ".join(lines))
            lines = []
        if follows_code:
            yield Text(f"{path}:{number}", token.string.lstrip("# ").strip())
            continue
        if not lines:
            first = number
        lines.append(token.string.lstrip("# ").strip())
        last = number
    if lines:
        yield Text(f"{path}:{first}", " ".join(lines))


def messages(path: Path, tree: ast.Module) -> Iterator[Text]:
    """Yield the literal text of what is raised, logged, printed or shown as help."""
    for node in ast.walk(tree):
        spoken: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            spoken = list(node.exc.args)
        elif isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if name in SPEAKING_CALLS:
                spoken = list(node.args)
            spoken += [keyword.value for keyword in node.keywords if keyword.arg == "help"]
        for expression in spoken:
            text = literal_text(expression)
            if len(text.split()) > 2:
                yield Text(f"{path}:{expression.lineno}", text)


def literal_text(expression: ast.expr) -> str:
    """Return the words of a string; an ellipsis replaces each value in an f-string."""
    if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
        return expression.value
    if isinstance(expression, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "…" for part in expression.values]
        return "".join(map(str, parts))
    if isinstance(expression, ast.BinOp):
        return f"{literal_text(expression.left)} {literal_text(expression.right)}"
    return ""


def documents(path: Path, text: str) -> Iterator[Text]:
    """Yield the paragraphs of a Markdown file, without its code blocks."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    line = 1
    for paragraph in text.split("\n\n"):
        yield Text(f"{path}:{line}", without_code(paragraph))
        line += paragraph.count("\n") + 2


def without_code(text: str) -> str:
    """Drop indented examples and inline code, whose words are not prose."""
    prose = [line for line in text.splitlines() if not line.startswith("    ")]
    return re.sub(r"`[^`]*`", "…", " ".join(prose))


# ------------------------------------------------------------------------ counts


def rates(texts: Iterable[Text]) -> dict[str, float]:
    """Return how often each phrase occurs per 10,000 words."""
    words = 0
    counts = dict.fromkeys(TURNS, 0)
    for text in texts:
        words += len(text.words.split())
        for name, (pattern, _goal) in TURNS.items():
            # "Of" counts only with a capital: "of a" is ordinary English.
            flags = 0 if name.startswith("sentences") else re.IGNORECASE
            counts[name] += len(re.findall(pattern, text.words, flags))
    result: dict[str, float] = {"words": words}
    for name, count in counts.items():
        result[name] = PER_WORDS * count / max(words, 1)
    return result


def python_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*.py")) if not any(part.startswith(".") for part in path.parts)]


def texts_of(root: Path) -> dict[str, list[Text]]:
    """Return the texts of a checkout by column: each package, tests, messages, documents."""
    columns: dict[str, list[Text]] = {}
    folders = [root / name for name in (*PACKAGES, "tests")]
    if not all(folder.is_dir() for folder in folders):
        folders = [root]
    columns["messages"] = []
    for folder in folders:
        texts: list[Text] = []
        for path in python_files(folder):
            source = path.read_text()
            tree = ast.parse(source)
            shown = path.relative_to(root)
            texts += [*docstrings(shown, tree), *comments(shown, source)]
            if folder.name != "tests":
                columns["messages"] += messages(shown, tree)
        columns[folder.name] = texts
    columns["documents"] = []
    for path in [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]:
        columns["documents"] += documents(path.relative_to(root), path.read_text())
    return columns


def main() -> None:
    """Print the table, or a random sample of texts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", nargs="?", type=Path, default=ROOT)
    parser.add_argument("--sample", type=int, help="print this many docstrings and half as many messages")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    columns = texts_of(options.root.resolve())
    if options.sample:
        draw = random.Random(options.seed)
        code = []
        for name in PACKAGES:
            for path in python_files(options.root.resolve() / name):
                code += docstrings(path.relative_to(options.root.resolve()), ast.parse(path.read_text()), str)
        # Shorter messages are mostly pieces of longer ones.
        whole = [text for text in columns["messages"] if len(text.words.split()) >= LEAST_WORDS]
        print(f"seed {options.seed}")
        for text in [*draw.sample(code, options.sample), *draw.sample(whole, options.sample // 2)]:
            print(f"\n{text.place}\n{text.words}")
        return
    product = [text for name in PACKAGES for text in columns.get(name, [])]
    by_column = {"product": rates(product)} if product else {}
    by_column |= {name: rates(texts) for name, texts in columns.items()}
    print(f"| per {PER_WORDS:,} words | {' | '.join(by_column)} | goal |")
    print(f"|---|{'--:|' * len(by_column)}--:|")
    totals = [f"{counts['words']:,.0f}" for counts in by_column.values()]
    print(f"| words | {' | '.join(totals)} | |")
    for name, (_pattern, goal) in TURNS.items():
        print(f"| {name} | {' | '.join(f'{counts[name]:.1f}' for counts in by_column.values())} | {goal} |")


if __name__ == "__main__":
    main()
