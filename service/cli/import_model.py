"""`stackseg models import PATH` adds a model; options state what its package does not, or a terminal is asked."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from service.cli.options import add_settings
from service.core.config import Settings
from service.core.errors import BadParameter, ConfigError, MissingKeys


def _parse_architecture(text: str) -> dict[str, Any]:
    """Read a call as it stands in Python, `UNet(in_channels=1, strides=(2, 2))`, whose arguments are plain values."""
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Name):
        return {"name": call.id, "arguments": {}}
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("a name with named arguments is expected")
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    return {"name": name, "arguments": {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}}


def _parse_normalisation(text: str) -> dict[str, Any]:
    kind, _, limits = text.strip().partition(":")
    numbers = [float(number) for number in limits.split(",")] if limits else []
    if len(numbers) not in {"percentile": (0, 2), "zscore": (0,), "range": (2,)}.get(kind, ()):
        raise ValueError("percentile, percentile:LOW,HIGH, zscore or range:LOW,HIGH is expected")
    return {"kind": kind, **dict(zip(("low", "high"), numbers, strict=False))}


def _parse_three(number: Callable[[str], float]) -> Callable[[str], list[float]]:
    def parse(text: str) -> list[float]:
        values = [number(part) for part in text.split(",")]
        if len(values) != 3:
            raise ValueError("three numbers, Z,Y,X, are expected")
        return values

    return parse


def _parse_choice(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in choices:
            raise ValueError(f"{' or '.join(choices)} is expected")
        return text.strip()

    return parse


def _parse_decoding(text: str) -> dict[str, Any]:
    return {"kind": _parse_choice("classes", "instances")(text)}


class Question(NamedTuple):
    """One thing that a package may leave open: its option, the key of model.yaml, what it means, and an example.

    optional  a model can do without
    """

    option: str
    key: str
    meaning: str
    example: str
    parse: Callable[[str], Any]
    optional: bool = False


QUESTIONS = (
    Question(
        "--architecture",
        "architecture",
        "the call that built the network: ShuffleUNet, UNet, BasicUNet, DynUNet or SegResNet with their arguments; any "
        "other network is imported as a file of torch.export or ONNX",
        "BasicUNet(spatial_dims=3, in_channels=1, out_channels=2)",
        _parse_architecture,
    ),
    Question("--channels", "input.channels", "channels that the network reads", "1", int, optional=True),
    Question(
        "--normalisation",
        "input.normalisation",
        "what was done to grey values: percentile:LOW,HIGH maps these to 0 and 1, range:LOW,HIGH these grey values, "
        "zscore subtracts the mean and divides by the deviation",
        "percentile:1,99.8",
        _parse_normalisation,
    ),
    Question(
        "--roi-size",
        "input.roi_size",
        "voxels Z,Y,X of a window, as of the crops in training",
        "64,64,64",
        _parse_three(int),
    ),
    Question(
        "--outputs",
        "outputs",
        "names of what the network gives, the background first",
        "background,cell",
        lambda text: [name.strip() for name in text.split(",")],
    ),
    Question(
        "--activation",
        "activation",
        "what makes probabilities of scores: softmax, sigmoid, or none where the network does it",
        "softmax",
        _parse_choice("softmax", "sigmoid", "none"),
    ),
    Question(
        "--decoding",
        "decoding",
        "classes: the output with the highest score; instances: objects, of outputs called foreground and distance",
        "classes",
        _parse_decoding,
    ),
    Question(
        "--voxel-size",
        "input.voxel_size",
        "Z,Y,X in um to which stacks are resampled, or none",
        "0.5,0.2,0.2",
        lambda text: None if text.strip() == "none" else _parse_three(float)(text),
        optional=True,
    ),
    Question(
        "--diameter",
        "input.diameter",
        "width in voxels of the objects that it was trained on",
        "20",
        float,
        optional=True,
    ),
)


def add_arguments(imported: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg models import`."""
    imported.add_argument(
        "package", type=Path, metavar="PATH", help="folder, zip archive or file; nothing is downloaded"
    )
    imported.add_argument("--name", help="name of the model; the package's own if not given")
    for question in QUESTIONS:
        text = f"{question.meaning}; such as '{question.example}'".replace("%", "%%")
        imported.add_argument(question.option, dest=question.key, metavar="VALUE", help=text)
    imported.add_argument(
        "--with",
        dest="stated",
        type=Path,
        metavar="YAML",
        help="keys of model.yaml, before what the package says",
    )
    imported.add_argument(
        "--trust",
        action="store_true",
        help="take TorchScript, too: a program, which can do whatever this command and the service can",
    )
    add_settings(imported, argparse.SUPPRESS)
    imported.set_defaults(run=run_import)


def run_import(options: argparse.Namespace, settings: Settings) -> int:
    """Import one package into the folder of `--models` or models.folder; print notes for the operator."""
    from service.inference.preprocessing.resample import prepare_tensor  # noqa: PLC0415
    from service.models.importers.import_model import import_model  # noqa: PLC0415

    if settings.models.folder is None:
        raise BadParameter("Say which folder gets the model: --models FOLDER, which is made where it is missing.")
    folder = settings.models.folder
    stated = {} if options.stated is None else _read_stated_keys(options.stated)
    given = {question.option: text for question in QUESTIONS if (text := getattr(options, question.key)) is not None}

    def run() -> None:
        keys = _merge(stated, given) | ({} if options.name is None else {"name": options.name})
        spec, notes = import_model(options.package, folder, keys, prepare=prepare_tensor, trust=options.trust)
        sys.stdout.write(f"{spec.folder}: {spec.identifier}, {spec.network}\n")
        for note in notes:
            sys.stdout.write(f"note: {note}\n")

    try:
        run()
    except MissingKeys as missing:
        if not (sys.stdin.isatty() and sys.stderr.isatty()):
            raise BadParameter(_explain(options, folder, missing.what, missing.problems, given)) from missing
        sys.stderr.write(f"{missing.what}. It does not say how the network is used.\n")
        given |= ask(missing.problems, given, _ask_on_terminal)
        sys.stderr.write(f"The same without questions:\n  {_command(options, folder, given)}\n")
        run()
    return 0


def ask(problems: Collection[str], given: Mapping[str, str], answer: Callable[[str], str]) -> dict[str, str]:
    """Return an answer for every key of `problems`, and for optional ones where there is one, by option.

    `answer` is called with a question until what it returns can be read.
    """
    answers: dict[str, str] = {}
    for question in QUESTIONS:
        needed = question.key in problems
        if question.option in given or not (needed or question.key in {"input.voxel_size", "input.diameter"}):
            continue
        default = "" if needed else "; empty: as sampled"
        prompt = f"{question.option[2:]}: {question.meaning}\n  such as {question.example}{default}\n> "
        while (text := answer(prompt).strip()) or needed:
            try:
                _read(question, text)
            except BadParameter as error:
                prompt = f"{error}\n> "
                continue
            answers[question.option] = text
            break
    return answers


def _ask_on_terminal(prompt: str) -> str:
    # To standard error, so that standard output has nothing but what was imported.
    sys.stderr.write(prompt)
    sys.stderr.flush()
    line = sys.stdin.readline()
    if not line:
        raise KeyboardInterrupt
    return line


def _explain(
    options: argparse.Namespace, folder: Path, what: str, problems: Mapping[str, str], given: Mapping[str, str]
) -> str:
    """Return what is missing, and one command that states it."""
    missing = [question for question in QUESTIONS if question.key in problems]
    extra = [question.option for question in QUESTIONS if question.optional and question not in missing]
    command = _command(options, folder, {**given, **{question.option: question.example for question in missing}})
    lines = [
        f"{what}. This is missing:",
        *_explain_problems(missing, problems),
        f"and where it matters {', '.join(extra)}. Correct these examples:",
        f"  {command}",
    ]
    return "\n".join(lines)


def _explain_problems(missing: Collection[Question], problems: Mapping[str, str]) -> Iterator[str]:
    """Yield lines about the missing options, and about keys that no option states."""
    yield from (f"  {question.option} ({question.key}): {question.meaning}" for question in missing)
    stated = [problems[question.key] for question in missing]
    yield from (f"    {problem}" for problem in stated if "files do not contain it" not in problem)
    others = problems.keys() - {question.key for question in QUESTIONS}
    yield from (f"  {key}: {problem}" for key, problem in problems.items() if key in others)


def _command(options: argparse.Namespace, folder: Path, given: Mapping[str, str]) -> str:
    parts = ["stackseg", "models", "import", str(options.package), "--models", str(folder)]
    parts += [part for option, text in given.items() for part in (option, text)]
    parts += ["--with", str(options.stated)] if options.stated is not None else []
    parts += ["--name", options.name] if options.name is not None else []
    return shlex.join(parts) + (" --trust" if options.trust else "")


def _merge(stated: Mapping[str, Any], given: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of model.yaml from a file, with those of options in their place. Raises BadParameter."""
    merged = dict(stated)
    for question in QUESTIONS:
        if question.option in given:
            section, _, key = question.key.rpartition(".")
            value = _read(question, given[question.option])
            merged |= {section: {**merged.get(section, {}), key: value}} if section else {key: value}
    return merged


def _read(question: Question, text: str) -> Any:
    try:
        return question.parse(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise BadParameter(f"{question.option}: {text!r:.80}: {reason}; such as {question.example}") from error


def _read_stated_keys(path: Path) -> dict[str, Any]:
    """Read keys of model.yaml from a YAML file. Raises ConfigError."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a mapping of keys of model.yaml is expected.")
    return content
