"""Every YAML composes, every setting is explained, and every slip gets one line."""

import dataclasses
import functools
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import hydra
import pytest
import yaml
from commands import run_command
from omegaconf import OmegaConf

from gc_dpr import config as schema
from gc_dpr.cli import main as command_line
from gc_dpr.cli.launch import config_folder, package_path
from gc_dpr.cli.settings import as_yaml, groups_of, presets, settings_of, to_settings
from gc_dpr.errors import ConfigError

CONF = config_folder()
REQUIRED = {
    "train_dense_encoder": ("output_dir=o", "model.name_or_path=m", "data.train_file=t"),
    "check_gradients": ("output_dir=o", "model.name_or_path=m", "data.train_file=t"),
    "generate_embeddings": ("output_dir=o", "checkpoint=c", "data.passages_file=p"),
    "build_index": ("output_dir=o", "embeddings_dir=e"),
    "retrieve": (
        "output_dir=o", "checkpoint=c", "index_dir=i", "data.questions_file=q",
        "data.passages_file=p",
    ),
    "evaluate_retrieval": ("output_dir=o", "runs=r"),
    "search": ("question=q", "checkpoint=c", "index_dir=i", "data.passages_file=p"),
}  # fmt: skip
TRAIN = "train_dense_encoder"


@functools.cache
def compose(command, *overrides):
    """The settings object of a command, without running it."""
    schema.register()
    OmegaConf.register_new_resolver("package_path", package_path, replace=True)
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return to_settings(command, hydra.compose(command, list(overrides)))


def given(command, *overrides):
    """The required settings of a command, but for those that are given, and these."""
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    return [text for text in REQUIRED[command] if text.partition("=")[0] not in keys] + [*overrides]


def choices(command):
    """Rows of presets, one per group, so that every preset is in some row."""
    groups = {group: presets(CONF, group) for group in groups_of(schema.COMMANDS[command])}
    for row in range(max(map(len, groups.values()), default=0)):
        yield {group: names[row % len(names)] for group, names in groups.items()}


PRESETS = [(command, row) for command in schema.COMMANDS for row in choices(command)]


def merged(command, *overrides):
    """The settings object made without Hydra, which takes most of the time."""
    given_values = OmegaConf.from_dotlist(list(overrides))
    return to_settings(
        command, OmegaConf.merge(OmegaConf.structured(schema.COMMANDS[command]), given_values)
    )


# ---------------------------------------------------------------------------------- composition


@pytest.mark.parametrize("command", schema.COMMANDS)
def test_every_command_composes_with_what_it_requires(command):
    settings = compose(command, *REQUIRED[command])
    assert type(settings) is schema.COMMANDS[command]


@pytest.mark.parametrize(("command", "row"), PRESETS)
def test_every_preset_composes(command, row):
    written = {
        f"{group}.{key}": value
        for group, preset in row.items()
        for key, value in yaml.safe_load((CONF / group / f"{preset}.yaml").read_text()).items()
        if key != "defaults"
    }
    # what a preset sets itself must not be covered by the required values
    needed = [t for t in REQUIRED[command] if written.get(t.partition("=")[0]) is None]
    settings = compose(command, *(f"{group}={preset}" for group, preset in row.items()), *needed)
    assert yaml.safe_load(as_yaml(settings)) == dataclasses.asdict(settings)
    for key, value in written.items():
        if value is not None and "${" not in str(value):
            group, _, name = key.partition(".")
            assert getattr(getattr(settings, group), name) == value, key


@pytest.mark.parametrize("experiment", presets(CONF, "experiment"))
def test_every_experiment_needs_only_an_output_folder(experiment):
    settings = compose(TRAIN, f"experiment={experiment}", "output_dir=o")
    written = yaml.safe_load((CONF / "experiment" / f"{experiment}.yaml").read_text())
    for key, value in written["train"].items():
        # YAML 1.1 reads 2e-5 as text, OmegaConf as a number
        assert getattr(settings.train, key) == (float(value) if "e-" in str(value) else value)


@pytest.mark.parametrize("data", ["factbook", "squad_sample", "nq"])
def test_a_data_preset_names_all_files(data):
    needed = [text for text in REQUIRED["retrieve"] if not text.startswith("data.")]
    settings = compose("retrieve", f"data={data}", "data.root=/elsewhere", *needed)
    for name in ("train_file", "passages_file", "questions_file"):
        assert getattr(settings.data, name).startswith("/elsewhere/")


@pytest.mark.parametrize("experiment", ["nq_1x11gb", "nq_8x32gb"])
def test_the_published_recipe(experiment):
    """Karpukhin et al. 2020 and Gao et al. 2021; FEATURES section 2."""
    settings = compose(TRAIN, f"experiment={experiment}", "output_dir=o")
    train, model = settings.train, settings.model
    assert (train.batch_size, train.hard_negatives, train.random_negatives) == (128, 1, 0)
    assert (model.max_question_length, model.max_passage_length) == (256, 256)
    assert (train.learning_rate, train.warmup_steps, train.epochs) == (2e-5, 1237, 40)
    assert (train.max_grad_norm, train.temperature, train.weight_decay) == (2.0, 1.0, 0.0)
    assert (train.mask_known_positives, train.positive_choice) == (False, "first")
    assert (model.shared, model.pooling, model.normalize) == (False, "first_token", False)
    assert (model.title_format, model.name_or_path) == ("pair", "bert-base-uncased")
    assert settings.data.train_file.endswith("nq-train.json")
    assert (train.max_steps, settings.hardware.precision) == (None, "fp16")


@pytest.mark.parametrize("hardware", presets(CONF, "hardware"))
def test_a_hardware_preset_changes_nothing_but_the_hardware(hardware):
    usual = dataclasses.asdict(compose(TRAIN, "experiment=nq_1x11gb", "output_dir=o"))
    other = dataclasses.asdict(
        compose(TRAIN, "experiment=nq_1x11gb", f"hardware={hardware}", "output_dir=o")
    )
    assert {**usual, "hardware": None} == {**other, "hardware": None}
    written = yaml.safe_load((CONF / "hardware" / f"{hardware}.yaml").read_text())
    assert written.items() <= other["hardware"].items()


def test_every_key_of_every_yaml_is_in_a_schema():
    keys = {setting.key for cls in schema.COMMANDS.values() for setting in settings_of(cls)}

    def leaves(value, prefix):
        if isinstance(value, dict):
            for name, inner in value.items():
                yield from leaves(inner, f"{prefix}.{name}" if prefix else name)
        else:
            yield prefix

    files = sorted(CONF.rglob("*.yaml"))
    assert len(files) > 20
    for file in files:
        group = file.relative_to(CONF).parts[0] if file.parent != CONF else ""
        values = yaml.safe_load(file.read_text()) or {}
        values.pop("defaults", None)
        values.pop("hydra", None)
        prefix = "" if group == "experiment" else group
        unknown = [key for key in leaves(values, prefix) if values and key not in keys]
        assert not unknown, f"{file}: {unknown}"


def test_required_settings_exist():
    for cls in schema.COMMANDS.values():
        assert set(cls.REQUIRED) <= {setting.key for setting in settings_of(cls)}


def test_a_composed_config_is_checked_after_composition_too(tmp_path):
    """A misspelt key may also come from a YAML of the user's own (TRAPS: B96)."""
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("bacth_size: 8\n")
    outcome = run_command(TRAIN, *given(TRAIN, "train=mine"), "--config-dir", tmp_path)
    assert outcome.status == 2
    assert "bacth_size" in outcome.error
    (tmp_path / "train" / "mine.yaml").write_text("batch_size: 8\n")
    outcome = run_command(TRAIN, *given(TRAIN, "train=mine"), "--config-dir", tmp_path, "--cfg=job")
    assert (outcome.status, yaml.safe_load(outcome.out)["train"]["batch_size"]) == (0, 8)


# ------------------------------------------------------------------------------------------ help


def squeezed(text):
    """Without white space: help texts are wrapped."""
    return re.sub(r"\s+", "", text)


@pytest.mark.parametrize("command", schema.COMMANDS)
def test_help_explains_every_setting_and_preset(command):
    outcome = run_command(command, "--help")
    assert (outcome.status, outcome.err) == (0, "")
    shown = squeezed(outcome.out)
    for setting in settings_of(schema.COMMANDS[command]):
        assert len(setting.meaning.split()) >= 2, setting
        assert f"{setting.key}=" in shown
        assert squeezed(f"[{setting.type}] {setting.meaning}") in shown
    for group in groups_of(schema.COMMANDS[command]):
        assert squeezed(f"{group}={'|'.join(presets(CONF, group))}") in shown
    assert squeezed("Required: " + ", ".join(schema.COMMANDS[command].REQUIRED)) in shown


def test_help_shows_the_values_that_would_be_used():
    outcome = run_command(TRAIN, "experiment=factbook_cpu", "train.seed=7", "--help")
    assert "train.seed=7  [whole number]" in outcome.out
    assert "train.batch_size=150  [whole number]" in outcome.out
    assert "hardware.device=cpu  [text]" in outcome.out
    assert "train.max_grad_norm=2.0  [number or null]" in outcome.out
    assert run_command(TRAIN, "train.seed=x", "--help").status == 0


def test_every_type_has_a_name_of_its_own():
    for cls in schema.COMMANDS.values():
        for setting in settings_of(cls):
            assert not re.search(r"[<>]|class|typing|\bint\b|\bstr\b", setting.type), setting


def test_the_overview_names_every_command():
    assert set(command_line.__globals__["COMMANDS"]) == set(schema.COMMANDS)
    for arguments in (["--help"], ["-h"], ["help"]):
        outcome = run_command(*arguments)
        assert outcome.status == 0
        assert all(command in outcome.out for command in schema.COMMANDS)
    assert run_command().status == 2
    assert re.fullmatch(r"gc-dpr \d+\.\d+\.\S+\n", run_command("--version").out)


# ----------------------------------------------------------------------------------------- slips

SLIPS = [
    # misspelt, forced, without its group (TRAPS: B96)
    ("train.bacth_size=8", "unknown setting 'train.bacth_size'; did you mean train.batch_size?"),
    ("+train.bacth_size=8", "unknown setting 'train.bacth_size'; did you mean train.batch_size?"),
    ("++train.bacth_size=8", "did you mean train.batch_size?"),
    ("batch_size=8", "unknown setting 'batch_size'; did you mean train.batch_size?"),
    ("lerning_rate=1", "did you mean"),
    ("output_dri=x", "did you mean output_dir?"),
    ("xyzzy=1", "unknown setting 'xyzzy'; see gc-dpr train_dense_encoder --help"),
    ("+hydra.foo=1", "unknown setting 'hydra.foo' of Hydra"),
    ("+hydra.run.dirr=x", "did you mean dir?"),
    ("data.train_file.x=1", "did you mean data.train_file?"),
    # wrong type
    ("train.batch_size=eight", "train.batch_size: Value 'eight'"),
    ("train.batch_size=1.5", "expected whole number: Questions per optimizer step"),
    ("train.learning_rate=fast", "expected number: Peak learning rate"),
    ("model.shared=maybe", "expected true/false"),
    ("train.seed=null", "train.seed"),
    ("data.train_file=3", "expected a path, a glob or a list of them"),
    ("data.train_file=[]", "expected a path, a glob or a list of them"),
    ("data.train_file=[a,3]", "expected a path, a glob or a list of them"),
    # presets
    ("model=bert_bose", "model=bert_bose: no such preset; did you mean bert_base?"),
    ("experiment=imagenet", "there are: factbook_cpu, nq_1x11gb, nq_8x32gb, squad_sample_cpu"),
    ("train=128", "train=128: expected the name of a preset, found 128"),
    ("hardware={device: cpu}", "expected the name of a preset"),
    ("train.+=8", "cannot read the setting"),
    # several runs without -m
    ("train.seed=1,2", "'train.seed=1,2' asks for several runs: add -m for that"),
    ("data.train_file=a,b", "a list is written 'data.train_file=[a,b]'"),
    ("model.name_or_path=a,b", "written 'model.name_or_path=\"a,b\"'"),
    # the grammar of values (TRAPS: B95)
    ("data.train_file=/a/epoch=3.json", "'data.train_file=\"/a/epoch=3.json\"'"),
    ("data.train_file=/a/b#1.json", "'data.train_file=\"/a/b#1.json\"'"),
    ("data.train_file=/a/(x).json", "'data.train_file=\"/a/(x).json\"'"),
    ("data.train_file=~/x", "'data.train_file=\"~/x\"'"),
    ("train.batch_size", "settings are written key=value"),
    ("/x", "settings are written key=value"),
    # empty
    ("output_dir=", "output_dir is required: Folder that everything is written to"),
    ("output_dir=' '", "output_dir is required"),
    ("model.name_or_path=null", "or choose a preset, such as model=bert_base"),
    ("data.train_file=", "or choose a preset that has it, such as data=factbook"),
    ("~train.seed", "a setting cannot be removed"),
    ("output_dir=${nowhere}", "output_dir: Interpolation key 'nowhere' not found"),
    # flags (TRAPS: B100)
    ("--local_rank=0", "torchrun --nproc-per-node N -m gc_dpr train_dense_encoder"),
    ("--local-rank=0", "comes from an old launcher"),
    ("--batch_size", "unknown flag --batch_size; settings are written key=value without dashes"),
    ("--cfg=everything", "invalid choice: 'everything'"),
    ("--config-dir=/no/such", "--config-dir /no/such: no such folder"),
    ("--config-name=other", "other"),
    ("--info=config --cfg=job", "only one of --run, --multirun, --cfg, --info"),
]


@pytest.mark.parametrize(("argument", "answer"), SLIPS)
def test_a_slip_gets_one_line_and_status_2(argument, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parts = argument.split() if argument.startswith("--") else [argument]
    outcome = run_command(TRAIN, *given(TRAIN, *parts))
    assert outcome.status == 2
    assert outcome.err.startswith(f"gc-dpr {TRAIN}: error: ")
    assert answer in outcome.error
    assert len(outcome.err.splitlines()) == 1
    assert outcome.out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", schema.COMMANDS)
def test_every_required_setting_is_asked_for(command):
    for key in schema.COMMANDS[command].REQUIRED:
        meaning = next(s.meaning for s in settings_of(schema.COMMANDS[command]) if s.key == key)
        with pytest.raises(ConfigError, match=re.escape(f"{key} is required: {meaning}")):
            merged(command, *[text for text in REQUIRED[command] if not text.startswith(key)])


@pytest.mark.parametrize(
    ("command", "argument", "answer"),
    [
        ("retrieve", "experiment=nq_1x11gb", "unknown setting 'experiment'"),
        ("retrieve", "train.seed=1", "unknown setting 'train.seed'"),
        ("build_index", "index=flatt", "did you mean flat?"),
        ("build_index", "index.factory=IVF4,Flat", "'index.factory=\"IVF4,Flat\"'"),
        ("evaluate_retrieval", "top_ks=5", "expected list of whole numbers: The k of the table"),
        ("evaluate_retrieval", "top_ks=[a]", "top_ks[0]"),
        ("evaluate_retrieval", "top_ks=1,5", "a list is written 'top_ks=[1,5]'"),
        ("evaluate_retrieval", "runs.a=b", "did you mean runs?"),
        ("search", "who?", "the question came in 2 pieces; quote it: \"when? who?\""),
    ],
)  # fmt: skip
def test_slips_of_the_other_commands(command, argument, answer):
    more = ["when?"] if command == "search" else []
    outcome = run_command(command, *more, *given(command, argument))
    assert outcome.status == 2
    assert answer in outcome.error


def test_a_slip_in_the_command():
    outcome = run_command("retrive", "top_k=3")
    assert outcome.status == 2
    assert outcome.error == "gc-dpr: error: unknown command 'retrive'; did you mean retrieve?"
    assert "there are: train_dense_encoder" in run_command("xyzzy").error


@pytest.mark.parametrize(
    ("argument", "answer"),
    [
        ("train.bacth_size=1,2", "did you mean train.batch_size?"),
        ("train.seed=a,b", "train.seed: Value 'a' of type 'str' could not be converted to Integer"),
        ("model=bert_bose,minilm", "model=bert_bose: no such preset; did you mean bert_base?"),
    ],
)
def test_slips_in_several_runs(argument, answer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = run_command(TRAIN, *given(TRAIN, argument), "-m")
    assert outcome.status == 2
    assert answer in outcome.error


def test_several_presets_at_once_need_m():
    outcome = run_command(TRAIN, *given(TRAIN, "model=minilm,own"))
    assert outcome.status == 2
    assert "add -m" in outcome.error


def test_hydra_s_own_settings_are_known():
    arguments = given(
        "build_index", "hydra.run.dir=x", "+hydra.job.env_set.A=b", "hydra.verbose=true"
    )
    outcome = run_command("build_index", *arguments, "--cfg", "job")
    assert outcome.status == 0, outcome.err


def test_flags_may_stand_anywhere():
    outcome = run_command(TRAIN, "train.seed=3", "--cfg", "job", "output_dir=o")
    assert outcome.status == 0, outcome.err
    values = yaml.safe_load(outcome.out)
    assert (values["train"]["seed"], values["output_dir"]) == (3, "o")


@pytest.mark.parametrize(
    "typed", ["who wrote a=b?", 'the "old" tower?', "früh, oder (spät)?", "a b", "C:\\t\\ ${x}\\"]
)
def test_a_typed_question_needs_no_hydra_grammar(typed):
    required = given("search", "question=x")[:-1]
    outcome = run_command("search", typed, *required, "--cfg", "job", "--resolve")
    assert yaml.safe_load(outcome.out)["question"] == typed


# ---------------------------------------------------------------------------------------- checks

CHECKS = [
    ("check_gradients", "questions=0", "questions=0: expected 1 or more"),
    (TRAIN, "model.pooling=max", "model.pooling='max': expected one of first_token, mean"),
    (TRAIN, "model.title_format=tab", "expected one of pair, space"),
    (TRAIN, "model.max_question_length=2", "expected 3 or more"),
    (TRAIN, "model.max_passage_length=0", "expected 3 or more"),
    (TRAIN, "model.num_layers=0", "expected 1 or more"),
    (TRAIN, "model.dropout=1", "model.dropout=1.0: expected 0 or more and less than 1"),
    (TRAIN, "model.dropout=-0.1", "expected 0 or more and less than 1"),
    (TRAIN, "model.shared=true model.passage_name_or_path=x", "has no effect with model.shared"),
    (TRAIN, "data.passages_quoting=excel", "expected one of csv, none"),
    (TRAIN, "data.on_missing_positives=drop", "expected one of skip, error"),
    (TRAIN, "data.answer_match=exact", "expected one of string, regex, kilt"),
    (TRAIN, "data.passages_file=[null]", "data.passages_file=[None]: expected a path"),
    (TRAIN, "data.questions_file=true", "data.questions_file=True: expected a path"),
    (TRAIN, "train.positive_choice=last", "expected one of first, random"),
    (TRAIN, "train.negative_choice=last", "expected one of first, random, rotate"),
    (TRAIN, "train.last_batch=pad", "expected one of keep, drop"),
    (TRAIN, "train.batch_size=0", "expected 1 or more"),
    (TRAIN, "train.hard_negatives=-1", "expected 0 or more"),
    (TRAIN, "train.random_negatives=-1", "expected 0 or more"),
    (TRAIN, "train.epochs=-1", "expected 0 or more"),
    (TRAIN, "train.max_steps=0", "expected 1 or more"),
    (TRAIN, "train.warmup_steps=-1", "expected 0 or more"),
    (TRAIN, "train.weight_decay=-1", "expected 0 or more"),
    (TRAIN, "train.learning_rate=nan", "train.learning_rate=nan: expected 0 or more"),
    (TRAIN, "train.temperature=0", "train.temperature=0.0: expected more than 0"),
    (TRAIN, "train.adam_epsilon=0", "expected more than 0"),
    (TRAIN, "train.max_grad_norm=0", "expected more than 0"),
    (TRAIN, "train.epochs=0 train.max_steps=3", "train.max_steps has no effect"),
    (TRAIN, "train.batch_size=1 train.hard_negatives=0", "leaves one candidate per question"),
    (TRAIN, "train.hard_negatives=0 train.negative_choice=random", "has no effect without neg"),
    (TRAIN, "hardware.device=gpu", "hardware.device='gpu': expected one of auto, cpu, cuda"),
    (TRAIN, "hardware.precision=fp64", "expected one of fp32, bf16, fp16"),
    (TRAIN, "hardware.question_chunk_tokens=0", "expected auto or a whole number, 1 or more"),
    (TRAIN, "hardware.passage_chunk_tokens=most", "expected auto or a whole number"),
    (TRAIN, "hardware.encode_batch_tokens=0", "expected 1 or more"),
    (TRAIN, "hardware.question_chunk_rows=0", "expected 1 or more"),
    (TRAIN, "hardware.passage_chunk_rows=0", "expected 1 or more"),
    (TRAIN, "hardware.threads=0", "expected 1 or more"),
    (TRAIN, "hardware.kept_chunks=-1", "expected auto or a whole number, 0 or more"),
    (TRAIN, "hardware.loader_workers=-1", "expected 0 or more"),
    ("generate_embeddings", "dtype=int8", "dtype='int8': expected one of float32, float16"),
    ("retrieve", "method=sparse", "method='sparse': expected one of dense, bm25"),
    ("retrieve", "top_k=0", "expected 1 or more"),
    ("retrieve", "method=bm25", "checkpoint has no effect with method=bm25"),
    ("retrieve", "method=bm25 checkpoint=null", "index_dir has no effect with method=bm25"),
    ("retrieve", "checkpoint=null", "checkpoint is required with method=dense: Folder that train"),
    ("retrieve", "index_dir=null", "index_dir is required with method=dense: Folder that build"),
    ("search", "top_k=0", "expected 1 or more"),
    ("evaluate_retrieval", "empty_answers=drop", "expected one of match, ignore"),
    ("evaluate_retrieval", "workers=-1", "expected 0 or more"),
    ("evaluate_retrieval", "top_ks=[]", "top_ks=[]: expected whole numbers of 1 or more"),
    ("evaluate_retrieval", "top_ks=[1,0]", "expected whole numbers of 1 or more"),
]  # fmt: skip


@pytest.mark.parametrize(("command", "overrides", "answer"), CHECKS)
def test_impossible_values_and_options_without_effect_are_refused(command, overrides, answer):
    first = overrides.split()[-1].partition("=")[0]
    with pytest.raises(ConfigError, match=re.escape(answer)) as caught:
        merged(command, *given(command, *overrides.split()))
    key = first if "effect" not in answer and "required" not in answer else ""
    assert key in str(caught.value) or "candidate" in answer


@pytest.mark.parametrize(
    "overrides",
    [
        "model.dropout=0", "train.learning_rate=0", "train.max_grad_norm=null",
        "train.batch_size=1 train.hard_negatives=1", "train.batch_size=2 train.hard_negatives=0",
        "train.hard_negatives=0 train.random_negatives=1 train.negative_choice=random",
        "train.epochs=0", "train.warmup_steps=0", "data.train_file=[a,b]",
        "model.shared=false model.passage_name_or_path=x",
    ],
)  # fmt: skip
def test_values_at_the_edge_are_allowed(overrides):
    merged(TRAIN, *given(TRAIN, *overrides.split()))


def test_every_check_that_config_makes_has_a_case():
    """Counted in the source, so that a new check asks for a new case."""
    files = Path(schema.__file__).parent.glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    checked = set(re.findall(r'\b(?:one_of|at_least)\(\s*"([a-z_.]+)"', source))
    checked |= {f"hardware.{name}" for name in typing.get_type_hints(schema.HardwareConfig)
                if "chunk" in name or "tokens" in name}  # fmt: skip
    tried = " ".join(overrides for _, overrides, _ in CHECKS)
    assert len(checked) > 20
    assert [key for key in checked if f"{key}=" not in tried] == []


# --------------------------------------------------------------------------------- real processes


def run_process(*command, **environment):
    return subprocess.run(
        [sys.executable, *command],
        capture_output=True, text=True, check=False, timeout=60, env={**os.environ, **environment},
    )  # fmt: skip


def test_module_and_script_start_the_same_command(tmp_path):
    script = Path(__file__).parent.parent / "scripts" / "evaluate_retrieval.py"
    by_script = run_process(script, "runs=x", "top_kss=[1]", f"output_dir={tmp_path / 'o'}")
    by_module = run_process(
        "-m",
        "gc_dpr",
        "evaluate_retrieval",
        "runs=x",
        "top_kss=[1]",
        f"output_dir={tmp_path / 'o'}",
    )
    line = "gc-dpr evaluate_retrieval: error: unknown setting 'top_kss'; did you mean top_ks?\n"
    assert (by_script.returncode, by_script.stderr) == (2, line)
    assert (by_module.returncode, by_module.stderr) == (2, line)


def test_every_command_has_a_script():
    folder = Path(__file__).parent.parent / "scripts"
    for command in schema.COMMANDS:
        text = (folder / f"{command}.py").read_text(encoding="utf-8")
        assert f'main(["{command}", *sys.argv[1:]])' in text


def test_only_rank_0_says_what_all_processes_see(tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    outcome = run_command(TRAIN, *given(TRAIN, "train.bacth_size=8"))
    assert (outcome.status, outcome.err) == (2, "")
    monkeypatch.setenv("RANK", "0")
    assert "[rank 0]: error: unknown setting" in run_command(TRAIN, "train.bacth_size=8").error


def test_commands_for_one_process_refuse_torchrun(monkeypatch):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    for command in ("build_index", "retrieve", "evaluate_retrieval", "search"):
        outcome = run_command(command, *REQUIRED[command])
        assert outcome.status == 2
        assert f"{command} runs in one process, torchrun started 2" in outcome.error


def test_nobody_reads_the_output():
    """``gc-dpr … --help | head -1`` ends quietly."""
    reader, writer = os.pipe()
    os.close(reader)
    ended = subprocess.run(
        [sys.executable, "-m", "gc_dpr", "build_index", "--help"],
        stdout=writer, stderr=subprocess.PIPE, text=True, check=False, timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    os.close(writer)
    assert (ended.returncode, ended.stderr) == (141, "")


def test_a_misspelt_key_in_a_preset_of_ones_own_is_named(tmp_path, capsys):
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "mine.yaml").write_text("btch_size: 5\n")
    with pytest.raises(SystemExit) as ending:
        command_line(
            ["train_dense_encoder", "--config-dir", str(tmp_path), "train=mine", "output_dir=x"]
        )
    assert ending.value.code == 2
    assert "unknown setting 'train.btch_size'; did you mean train.batch_size?" in (
        capsys.readouterr().err
    )
