"""The configuration is strict: faults I1, I3, I5 and their kinds, each with an error a user can act on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from surefoot.config import parse_duration_s
from surefoot.config_file import config_as_yaml, config_changes, load_config, parse_config, read_yaml
from surefoot.errors import ConfigError

MINIMAL: dict[str, Any] = {
    "algorithm": "sft",
    "run_dir": "run",
    "max_num_steps": 5,
    "policy": {"model_name": "some/model"},
    "data": {"train": {"path": "train.jsonl"}},
}


def refused(*overrides: str, values: dict[str, Any] | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(values or MINIMAL, overrides)
    return str(caught.value)


def test_defaults_fill_the_rest() -> None:
    config = parse_config(MINIMAL)
    assert config.checkpointing.save_period == 100
    assert config.policy.train_micro_batch_size == 4


def test_effective_configuration_loads_again_as_itself(tmp_path: Path) -> None:
    config = parse_config(MINIMAL, ["policy.optimizer.lr=2e-5", "data.validation={test: {path: a.jsonl}}"])
    file = tmp_path / "config.yaml"
    file.write_text(config_as_yaml(config))
    assert load_config(file).model_dump() == config.model_dump()


@pytest.mark.parametrize(
    ("override", "path", "hint"),
    [
        ("max_num_step=3", "max_num_step: unknown key", "did you mean max_num_steps?"),
        ("policy.optimizer.learning_rat=1e-5", "policy.optimizer.learning_rat: unknown key", ""),
        ("checkpointing.save_periodd=2", "checkpointing.save_periodd", "did you mean checkpointing.save_period?"),
        ("save_period=2", "save_period: unknown key", "it belongs at checkpointing.save_period"),
        ("checkpointing.lr=2", "checkpointing.lr: unknown key", "it belongs at policy.optimizer.lr"),
        ("data.validation.test={pathh: x}", "data.validation.test.pathh", "did you mean data.validation.test.path?"),
        ("sft.val_batch_sise=2", "sft.val_batch_sise: unknown key", "did you mean sft.val_batch_size?"),
    ],
)
def test_unknown_key_names_its_path_and_the_nearest_valid_key(override: str, path: str, hint: str) -> None:
    message = refused(override)
    assert path in message
    assert hint in message


@pytest.mark.parametrize("text", ["2e-5", "'2e-5'", '"2e-5"', "0.00002", "2E-5"])
def test_a_number_is_a_number_quoted_or_not(text: str) -> None:
    assert parse_config(MINIMAL, [f"policy.optimizer.lr={text}"]).policy.optimizer.lr == 2e-5


@pytest.mark.parametrize("text", ["10", "10.0", "'10'", "1e1"])
def test_a_whole_number_in_any_spelling(text: str) -> None:
    assert parse_config(MINIMAL, [f"max_num_steps={text}"]).max_num_steps == 10


@pytest.mark.parametrize(
    ("override", "found"),
    [
        ("policy.optimizer.lr=-1", "-1"),
        ("policy.optimizer.lr=0", "0"),
        ("policy.optimizer.lr=.nan", "nan"),
        ("policy.optimizer.lr=nan", "'nan' (text)"),
        ("policy.optimizer.lr=inf", "'inf' (text)"),
        ("policy.optimizer.lr=fast", "'fast' (text)"),
        ("policy.optimizer.lr=true", "True (true/false)"),
        ("policy.optimizer.lr=[1]", "[1] (a list)"),
        ("policy.optimizer.lr=", "None (nothing)"),
        ("max_num_steps=0", "0"),
        ("max_num_steps=-3", "-3"),
        ("max_num_steps=10.5", "10.5"),
        ("max_num_steps=ten", "'ten' (text)"),
        ("max_num_steps=true", "True (true/false)"),
        ("seed=-1", "-1"),
        ("val_at_start='false'", "'false' (text)"),
        ("val_at_start=1", "1 (a whole number)"),
        ("run_dir=7", "7 (a whole number)"),
        ("policy.precision=fp8", "'fp8'"),
        ("policy.optimizer.beta2=1.0", "1.0"),
        ("policy.scheduler.min_lr_ratio=1.5", "1.5"),
        ("data.train=train.jsonl", "'train.jsonl' (text)"),
        ("checkpointing.keep_top_k=0", "0"),
    ],
)
def test_wrong_types_and_impossible_values_name_path_and_value(override: str, found: str) -> None:
    message = refused(override)
    assert override.partition("=")[0] in message
    assert f"found {found}" in message


def test_a_bare_off_is_the_word_although_yaml_reads_false() -> None:
    assert parse_config(MINIMAL, ["logger.progress=off"]).logger.progress == "off"
    assert "found True" in refused("logger.progress=on")


@pytest.mark.parametrize(
    ("overrides", "policy", "value"),
    [
        ([], 1e-5, 1e-5),
        (["policy.lora={}"], 2e-4, 2e-4),
        (["policy.lora={}", "policy.optimizer.weight_decay=0.1"], 2e-4, 2e-4),
        (["policy.lora={}", "policy.optimizer.lr=1e-3"], 1e-3, 1e-3),
        (["policy.lora={}", "value.lora=null"], 2e-4, 1e-5),
        (["value.lora={}"], 1e-5, 2e-4),
        (["value.lora={}", "value.optimizer={lr: 3e-3}"], 1e-5, 3e-3),
        (["policy.lora=null"], 1e-5, 1e-5),
    ],
)
def test_an_adapter_learns_at_a_rate_of_its_own(overrides: list[str], policy: float, value: float) -> None:
    rewards = {"rewards": [{"name": "exact_match"}]}
    config = parse_config({**MINIMAL, **rewards, "algorithm": "ppo", "ppo": {}}, overrides)
    again = parse_config(yaml.safe_load(config_as_yaml(config)))
    for made in (config, again):
        rates = [made.engine(section).optimizer.lr for section in ("policy", "value")]
        assert rates == [policy, value]
    kept = parse_config(yaml.safe_load(config_as_yaml(parse_config(MINIMAL))), ["policy.lora={}"])
    assert kept.policy.optimizer.lr == 1e-5, "a rate on record is one that was given"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["decay_steps=5"], "no effect with name: constant"),
        (["min_lr_ratio=0.1"], "no effect with name: constant"),
        (["name=cosine", "decay_steps=5", "warmup_steps=5"], "decay_steps (5) must be above warmup_steps (5)"),
    ],
)
def test_a_schedule_that_cannot_be_meant(overrides: list[str], words: str) -> None:
    assert words in refused(*(f"policy.scheduler.{override}" for override in overrides))


def test_batch_sizes_that_do_not_divide_are_named_with_their_numbers() -> None:
    message = refused("policy.train_global_batch_size=6", "policy.train_micro_batch_size=4")
    assert "train_global_batch_size (6) must be a multiple of train_micro_batch_size (4)" in message


@pytest.mark.parametrize(
    "override",
    [
        "policy.model_init={model_type: llama}",  # and model_name
        "policy={}",
        "policy={model_init: {model_type: llama}}",  # no tokenizer
        "policy={model_init: {hidden_size: 8}, tokenizer: {name: x}}",
    ],
)
def test_a_model_comes_from_one_place(override: str) -> None:
    assert "model_" in refused(override)


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("max_num_steps=null", "max_num_steps: nothing says when the run ends; "),
        ("policy.train_micro_batch_size=3", "policy: train_global_batch_size (32) must be a multiple of "),
        ("data.validation={a b: {path: x}}", "data.validation: expected a set's name without spaces"),
        ("checkpointing.metric_name=loss", "checkpointing.metric_name: expected train:<metric>, "),
        ("checkpointing.metric_name='val:x'", "val_period, val_at_start, val_at_end and metric_name val:… need a set"),
        ("policy=3", "policy: expected a section, a mapping of keys to values, found 3"),
    ],
)
def test_a_fault_begins_with_the_file_and_the_key(tmp_path: Path, override: str, line: str) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(MINIMAL))
    with pytest.raises(ConfigError) as caught:
        load_config(file, [override])
    assert str(caught.value).startswith(f"{file} cannot be run:\n  - {line}")
    with pytest.raises(ConfigError, match=rf"^{file}: algorithm: expected"):
        load_config(file, ["algorithm=none"])


def test_all_faults_are_listed_at_once() -> None:
    message = refused("max_num_steps=0", "policy.optimizer.lr=-1", "nonsense=1")
    assert message.count("\n  - ") == 3


def test_missing_section_is_named() -> None:
    assert "data: missing" in refused(values={k: v for k, v in MINIMAL.items() if k != "data"})


@pytest.mark.parametrize(
    ("name", "expected"),
    [("stf", "did you mean sft?"), ("my.module", "no module 'my.module'"), ("surefoot.errors", "found none")],
)
def test_unknown_algorithm(name: str, expected: str) -> None:
    assert expected in refused(f"algorithm={name}")


def test_algorithm_missing_or_of_a_wrong_type() -> None:
    assert "algorithm: expected" in refused(values={"run_dir": "x"})
    assert "found 3" in refused("algorithm=3")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("seed: 1\nseed: 2\n", "line 2: key 'seed' is given twice (first in line 1)"),
        ("policy:\n  lr: 1\n  lr: 1\n", "line 3: key 'lr' is given twice"),
        ("- a\n- b\n", "expected a mapping of keys to values, found a list"),
        ("", "expected a mapping of keys to values, found nothing"),
        ("a: [1\n", "is not valid YAML"),
        ("1: x\n", "keys are names, found 1"),
        ("a: !!python/object/apply:os.system ['true']\n", "is not valid YAML"),
        ("a: !!int x\n", "is not valid YAML"),
        ("a: !!bool x\n", "is not valid YAML"),
        ("a: !!timestamp x\n", "is not valid YAML"),
        ("a: &a\n  b: *a\n", "is not valid YAML"),
        ("[" * 5000, "nested too deeply"),
        ('a: "x\\0y"\n', "line 1: expected text"),
        ('a:\n  b: "x\\ud800"\n', "line 2: expected text"),
    ],
)
def test_yaml_faults(tmp_path: Path, text: str, expected: str) -> None:
    file = tmp_path / "config.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_yaml(file)
    assert expected in str(caught.value)
    assert str(file) in str(caught.value)


def test_merge_keys_are_not_duplicates(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("base: &b {x: 1}\none:\n  <<: *b\n  y: 2\n")
    assert read_yaml(file)["one"] == {"x": 1, "y": 2}


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "sft.yaml").write_text("{}")
    with pytest.raises(ConfigError, match=r"did you mean .*sft\.yaml"):
        load_config(tmp_path / "stf.yaml")


def test_a_file_that_is_not_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "x.yaml")


@pytest.mark.parametrize("override", ["seed", "=3", "a..b=3", "seed.x=3", "seed=[1", ".=1"])
def test_malformed_overrides(override: str) -> None:
    values = {**MINIMAL, "seed": 3}
    assert f"override {override!r}" in refused(override, values=values)


def test_overrides_make_missing_parents_and_leave_the_file_alone() -> None:
    config = parse_config(MINIMAL, ["policy.scheduler.warmup_steps=3"])
    assert config.policy.scheduler.warmup_steps == 3
    assert "scheduler" not in MINIMAL["policy"]


@pytest.mark.parametrize(("text", "seconds"), [("00:00:00:01", 1), ("00:03:30:00", 12600), ("10:00:00:00", 864000)])
def test_durations(text: str, seconds: int) -> None:
    assert parse_duration_s(text) == seconds


@pytest.mark.parametrize("text", ["00:03:45:00", "10:00:00:00", "'10:00:00:00'"])
def test_a_duration_needs_no_quotes(text: str) -> None:
    config = parse_config(MINIMAL, [f"checkpointing.checkpoint_must_save_by={text}"])
    assert config.checkpointing.checkpoint_must_save_by == text.strip("'")


@pytest.mark.parametrize("text", ["3:30", "00:24:00:00", "00:00:60:00", "00:00:00:60", "1h", "-1:00:00:00"])
def test_malformed_durations(text: str) -> None:
    assert "DD:HH:MM:SS" in refused(f"checkpointing.checkpoint_must_save_by='{text}'")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("max_num_steps=null", "nothing says when the run ends"),
        ("val_period=2", "need a set in data.validation"),
        ("checkpointing.metric_name='val:loss'", "need a set in data.validation"),
    ],
)
def test_keys_that_need_each_other(override: str, expected: str) -> None:
    assert expected in refused(override)


def test_a_metric_of_a_set_that_does_not_exist() -> None:
    message = refused("data.validation.v.path=x", "checkpointing.metric_name='val:w/loss'", "val_period=1")
    assert "no validation set 'w', only v" in message


@pytest.mark.parametrize("name", ["loss", "test:loss", "val:", "train: loss"])
def test_malformed_metric_name(name: str) -> None:
    assert "metric_name" in refused(f"checkpointing.metric_name='{name}'")


def test_changes_say_what_a_resume_may_change() -> None:
    before = parse_config(MINIMAL)
    after = parse_config(
        MINIMAL, ["max_num_steps=9", "policy.optimizer.lr=1.0", "logger.tensorboard=false", "data.validation.v.path=x"]
    )
    allowed = {change.path: change.allowed for change in config_changes(before, after)}
    assert {p for p, ok in allowed.items() if not ok} == {"policy.optimizer.lr"}
    assert {"max_num_steps", "logger.tensorboard", "data.validation.v.path"} <= set(allowed)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run_dir=''", "run_dir: string should have at least 1 character"),
        ("data.train.path=''", "data.train.path: string"),
        ("policy.num_threads=1e30", "less than or equal to 1024"),
        ("data.num_workers=1e30", "less than or equal to 256"),
        ("data.validation={'': {path: x}}", "expected a set's name without spaces"),
        ("data.validation={a/b: {path: x}}", "found 'a/b'"),
        ("algorithm=.sft", "sft or a dotted module name"),
        ("algorithm=..", "sft or a dotted module name"),
    ],
)
def test_values_that_would_mean_something_else(override: str, expected: str) -> None:
    assert expected in refused(override)


def test_a_date_is_a_text() -> None:
    assert parse_config(MINIMAL, ["run_dir=2024-01-31"]).run_dir == "2024-01-31"
    assert parse_config(MINIMAL, ["run_dir=2024-99-99"]).run_dir == "2024-99-99"
