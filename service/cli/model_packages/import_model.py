"""`stackseg models import PATH`: import a model. Options or answers on a terminal provide missing metadata."""

from __future__ import annotations

import argparse
import ast
import shlex
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from service.cli.model_packages.describe_model import describe_model
from service.cli.model_packages.package_source import add_download_options, list_download_options, provide_package
from service.cli.options import add_settings_options
from service.core.config import Settings
from service.core.errors import BadParameter, ConfigError, MissingKeys
from service.core.files.documents import parse_yaml
from service.core.quantities import parse_float, parse_integer

# Persistence for which all maxima of a connected foreground become one object, because probabilities differ by less.
COMPONENT_PERSISTENCE = 2.0


def _parse_architecture(text: str) -> dict[str, Any]:
    """Parse a call in Python syntax with literal keyword arguments, such as `UNet(in_channels=1, strides=(2, 2))`."""
    call = ast.parse(text.strip(), mode="eval").body
    if isinstance(call, ast.Name):
        return {"name": call.id, "arguments": {}}
    if not isinstance(call, ast.Call) or call.args or not isinstance(call.func, ast.Name | ast.Attribute):
        raise ValueError("expected a name with keyword arguments")
    name = call.func.id if isinstance(call.func, ast.Name) else call.func.attr
    return {"name": name, "arguments": {str(item.arg): ast.literal_eval(item.value) for item in call.keywords}}


def _parse_normalization(text: str) -> dict[str, Any]:
    kind, _, limits = text.strip().partition(":")
    numbers = [parse_float(number) for number in limits.split(",")] if limits else []
    if len(numbers) not in {"percentile": (0, 2), "zscore": (0,), "range": (2,)}.get(kind, ()):
        raise ValueError("expected percentile, percentile:LOW,HIGH, zscore or range:LOW,HIGH")
    return {"kind": kind, **dict(zip(("low", "high"), numbers, strict=False))}


def _make_triple_parser(parse_number: Callable[[str], float]) -> Callable[[str], list[float]]:
    def parse(text: str) -> list[float]:
        values = [parse_number(part) for part in text.split(",")]
        if len(values) != 3:
            raise ValueError("expected three numbers Z,Y,X")
        return values

    return parse


def _make_choice_parser(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text.strip() not in choices:
            raise ValueError(f"expected {' or '.join(choices)}")
        return text.strip()

    return parse


def _parse_activation(text: str) -> str | dict[str, str]:
    if "=" not in text:
        return _make_choice_parser("softmax", "sigmoid", "none")(text)
    pairs = [part.rpartition("=") for part in text.split(",")]
    parse = _make_choice_parser("sigmoid", "none")
    return {name.strip(): parse(choice) for name, _, choice in pairs}


def _parse_decoding(text: str) -> dict[str, Any]:
    kind, _, name = text.strip().partition(":")
    if kind == "boundaries":
        return {"kind": kind, "boundary": name or "boundary"}
    if kind == "components":
        output = name or "foreground"
        return {"kind": "instances", "foreground": output, "distance": output, "persistence": COMPONENT_PERSISTENCE}
    return {"kind": _make_choice_parser("classes", "instances", "boundaries")(text)}


class Question(NamedTuple):
    """Metadata that a package may lack, with its option, its key in model.yaml, an explanation and an example.

    is_optional  whether the model works without this metadata
    """

    option: str
    key: str
    meaning: str
    example: str
    parse: Callable[[str], Any]
    is_optional: bool = False


QUESTIONS = (
    Question(
        "--architecture",
        "architecture",
        "Network class (such as ShuffleUNet, MONAI's UNet, BasicUNet, DynUNet or SegResNet, or pytorch-3dunet's UNet3D "
        "or ResidualUNet3D) with its arguments. Import other networks from torch.export or ONNX files",
        "BasicUNet(spatial_dims=3, in_channels=1, out_channels=2)",
        _parse_architecture,
    ),
    Question("--channels", "input.channels", "Number of input channels", "1", parse_integer, is_optional=True),
    Question(
        "--normalisation",
        "input.normalisation",
        "Intensity normalization: 'percentile:LOW,HIGH' maps these percentiles to 0 and 1, 'range:LOW,HIGH' maps these "
        "intensities to 0 and 1, and 'zscore' subtracts the mean and divides by the standard deviation",
        "percentile:1,99.8",
        _parse_normalization,
    ),
    Question(
        "--roi-size",
        "input.roi_size",
        "Window size Z,Y,X in voxels, equal to the size of the training crops",
        "64,64,64",
        _make_triple_parser(parse_integer),
    ),
    Question(
        "--outputs",
        "outputs",
        "Names of the outputs, beginning with the background",
        "background,cell",
        lambda text: [name.strip() for name in text.split(",")],
    ),
    Question(
        "--output-tensor",
        "weights.output",
        "Name of the tensor with the scores, if the network returns several tensors of the same shape",
        "out",
        str.strip,
        is_optional=True,
    ),
    Question(
        "--activation",
        "activation",
        "Function that converts scores to probabilities: 'softmax', 'sigmoid', or 'none' if the network includes it; "
        "'sigmoid' and 'none' may be specified for each output, as in 'foreground=sigmoid,distance=none'",
        "softmax",
        _parse_activation,
    ),
    Question(
        "--decoding",
        "decoding",
        "Decoding method: 'classes' selects the output with the highest score, 'instances' uses the outputs named "
        "'foreground' and 'distance' to separate objects, 'boundaries:NAME' uses the output NAME with the probability "
        "of a boundary, and 'components:NAME' separates the connected components of the output NAME above a threshold",
        "classes",
        _parse_decoding,
    ),
    Question(
        "--voxel-size",
        "input.voxel_size",
        "Voxel size Z,Y,X in micrometers to which stacks are resampled, or 'none' to keep the original resolution",
        "0.5,0.2,0.2",
        lambda text: None if text.strip() == "none" else _make_triple_parser(parse_float)(text),
        is_optional=True,
    ),
    Question(
        "--diameter", "input.diameter", "Diameter of training objects, in voxels", "20", parse_float, is_optional=True
    ),
)


def add_arguments(import_parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `stackseg models import`."""
    import_parser.add_argument(
        "package",
        metavar="PATH",
        help="Folder, zip archive or file with the model, its https URL, or the name of a model of bioimage.io",
    )
    add_download_options(import_parser)
    import_parser.add_argument("--name", help="Name of the model (default: the name in the package)")
    for question in QUESTIONS:
        text = f"{question.meaning}. Example: '{question.example}'".replace("%", "%%")
        import_parser.add_argument(question.option, dest=question.key, metavar="VALUE", help=text)
    import_parser.add_argument(
        "--with",
        dest="key_file",
        type=Path,
        metavar="YAML",
        help="YAML file with keys of model.yaml, which override the metadata of the package",
    )
    import_parser.add_argument(
        "--trust",
        action="store_true",
        help="Also accept TorchScript files, which are programs that run with all permissions of this command and of "
        "the service",
    )
    add_settings_options(import_parser, argparse.SUPPRESS)
    import_parser.set_defaults(run=run_import)


def run_import(options: argparse.Namespace, settings: Settings) -> int:
    """Import one package into the folder set by `--models` or `models.folder`, and print notes for the operator."""
    from service.inference.preprocessing.resample import prepare_tensor  # noqa: PLC0415
    from service.models.importers.import_model import import_model  # noqa: PLC0415

    if settings.models.folder is None:
        raise BadParameter("Specify the folder for the model with --models FOLDER. It is created if it does not exist.")
    folder = settings.models.folder
    file_keys = _read_key_file(options.key_file)
    option_values = {
        question.option: text for question in QUESTIONS if (text := getattr(options, question.key)) is not None
    }

    def import_package(package: Path) -> None:
        keys = _merge_keys(file_keys, option_values) | ({} if options.name is None else {"name": options.name})
        spec, notes = import_model(package, folder, keys, prepare=prepare_tensor, trust=options.trust)
        sys.stdout.write(f"{spec.folder}: {spec.identifier}, {spec.network_name}\n")
        sys.stdout.writelines(f"  {line}\n" for line in describe_model(spec))
        sys.stdout.writelines(f"note: {note}\n" for note in notes)

    with provide_package(options, folder) as package:
        try:
            import_package(package)
        except MissingKeys as missing:
            if not (sys.stdin.isatty() and sys.stderr.isatty()):
                raise BadParameter(
                    _explain_missing_keys(options, folder, missing.package, missing.problems, option_values)
                ) from missing
            sys.stderr.write(f"{missing.package}. The package lacks information about how to use the network.\n")
            option_values |= ask_questions(missing.problems, option_values, _ask_on_terminal)
            command = _format_command(options, folder, option_values)
            sys.stderr.write(f"The same command without questions:\n  {command}\n")
            import_package(package)
    return 0


def ask_questions(
    problems: Collection[str], option_values: Mapping[str, str], ask: Callable[[str], str]
) -> dict[str, str]:
    """Return answers by option, for all keys in `problems` and for the optional keys that the user provides.

    `ask` is called with a prompt until it returns a valid answer.
    """
    answers: dict[str, str] = {}
    for question in QUESTIONS:
        is_required = question.key in problems
        if question.option in option_values or not (
            is_required or question.key in {"input.voxel_size", "input.diameter"}
        ):
            continue
        default = "" if is_required else "; leave empty to keep the original resolution"
        prompt = f"{question.option[2:]}: {question.meaning}\n  for example {question.example}{default}\n> "
        while (text := ask(prompt).strip()) or is_required:
            try:
                _parse_answer(question, text)
            except BadParameter as error:
                prompt = f"{error}\n> "
                continue
            answers[question.option] = text
            break
    return answers


def _ask_on_terminal(prompt: str) -> str:
    # Standard output is reserved for the imported models.
    sys.stderr.write(prompt)
    sys.stderr.flush()
    if not (line := sys.stdin.readline()):
        raise KeyboardInterrupt
    return line


def _explain_missing_keys(
    options: argparse.Namespace,
    folder: Path,
    package_description: str,
    problems: Mapping[str, str | None],
    option_values: Mapping[str, str],
) -> str:
    """Return a message with the missing keys and an example command that specifies them."""
    missing_questions = [question for question in QUESTIONS if question.key in problems]
    optional_options = [
        question.option for question in QUESTIONS if question.is_optional and question not in missing_questions
    ]
    command = _format_command(
        options, folder, {**option_values, **{question.option: question.example for question in missing_questions}}
    )
    lines = [
        f"{package_description}. The following information is missing:",
        *_explain_problems(missing_questions, problems),
        f"Optional: {', '.join(optional_options)}. Replace the examples in this command:",
        f"  {command}",
    ]
    return "\n".join(lines)


def _explain_problems(missing_questions: Collection[Question], problems: Mapping[str, str | None]) -> Iterator[str]:
    """Yield lines about missing options, and about missing keys that have no option."""
    yield from (f"  {question.option} ({question.key}): {question.meaning}" for question in missing_questions)
    missing_problems = [problems[question.key] for question in missing_questions]
    yield from (f"    {problem}" for problem in missing_problems if problem is not None)
    other_keys = problems.keys() - {question.key for question in QUESTIONS}
    yield from (f"  {key}: {problem or 'missing'}" for key, problem in problems.items() if key in other_keys)


def _format_command(options: argparse.Namespace, folder: Path, option_values: Mapping[str, str]) -> str:
    words = ["stackseg", "models", "import", str(options.package), "--models", str(folder)]
    words += list_download_options(options)
    words += [word for option, text in option_values.items() for word in (option, text)]
    words += ["--with", str(options.key_file)] if options.key_file is not None else []
    words += ["--name", options.name] if options.name is not None else []
    return shlex.join(words) + (" --trust" if options.trust else "")


def _merge_keys(file_keys: Mapping[str, Any], option_values: Mapping[str, str]) -> dict[str, Any]:
    """Return the keys of model.yaml from a file and from options, which take precedence. Raises BadParameter."""
    keys = dict(file_keys)
    for question in QUESTIONS:
        if question.option in option_values:
            section, _, key = question.key.rpartition(".")
            value = _parse_answer(question, option_values[question.option])
            value = _keep_other_keys(keys.get(question.key), value)
            keys |= {section: {**keys.get(section, {}), key: value}} if section else {key: value}
    return keys


def _keep_other_keys(file_value: Any, value: Any) -> Any:
    """Add the other keys in the file to a block in an option, unless both are of different kinds."""
    are_blocks = isinstance(file_value, Mapping) and isinstance(value, Mapping) and "kind" in value
    return {**file_value, **value} if are_blocks and file_value.get("kind", value["kind"]) == value["kind"] else value


def _parse_answer(question: Question, text: str) -> Any:
    try:
        return question.parse(text)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else error
        raise BadParameter(
            f"The value {text!r:.80} of {question.option} is not valid: {reason}. For example, use {question.example}."
        ) from error


def _read_key_file(path: Path | None) -> dict[str, Any]:
    """Read keys of model.yaml from a YAML file, if there is one. Raises ConfigError."""
    try:
        content = {} if path is None else parse_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must contain a mapping with keys of model.yaml.")
    return content
