"""What can be composed from conf/, and what is refused before anything is built."""

import random
import re
from pathlib import Path

import pytest
from hydra.errors import MissingConfigException
from omegaconf import DictConfig, OmegaConf
from tiny import BACKENDS, ROOT, compose, overrides, tiny

from logitless import fit, job
from logitless.config import check_train_config

GROUPS = {
    key: sorted(file.stem for file in (ROOT / "conf" / key).glob("*.yaml"))
    for entry in OmegaConf.load(ROOT / "conf" / "train.yaml").defaults
    if isinstance(entry, DictConfig)
    for key in entry
    if not key.startswith("override hydra/")
}
EXPERIMENTS = GROUPS.pop("experiment")  # which change keys of all groups
# What conf/model/*.yaml may set outside `model`: train.yaml has ??? there.
GLOBAL_KEYS_OF_MODEL = {"seq_len", "batch_size", "max_steps", "warmup_steps", "lr"}


def checked(**choices: str) -> DictConfig:
    """The composition, which passed check_config or was refused by the name of the one key that must be given."""
    config = compose(*(f"{group}={name}" for group, name in choices.items()))
    if choices.get("data") == "text":
        with pytest.raises(ValueError, match=r"data\.path"):
            check_train_config(config)
        config.data.path = "some.txt"
    check_train_config(config)
    return config


def changed_keys(config: DictConfig, default: DictConfig) -> set[str]:
    a, b = (OmegaConf.to_container(c, resolve=False) for c in (config, default))
    return {key for key in a | b if a.get(key) != b.get(key)}


def test_every_group_of_train_yaml_has_files():
    assert GROUPS.keys() >= {"model", "data", "tokenizer", "loss", "trainer", "logger"}
    assert all(GROUPS.values())
    assert EXPERIMENTS


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_composes_with_every_loss_and_says_how_to_run_it(name):
    for backend in BACKENDS:
        assert checked(experiment=name, loss=backend).loss._target_.endswith(backend)
    head = (ROOT / "conf" / "experiment" / f"{name}.yaml").read_text().partition("defaults:")[0]
    (command,) = re.findall(r"^#   python scripts/train\.py .*$", head, flags=re.M)
    assert f"experiment={name}" in command
    for key, _, values in (override.partition("=") for override in command.split(" -m ")[1].split()):
        for value in values.split(",") if key != "hydra/sweeper" else ():
            checked(**{"experiment": name, key: value})
    assert "H200" in head or "CPU" in head, "where it was seen, and how long it takes"


@pytest.mark.parametrize(("group", "name"), [(g, n) for g, names in GROUPS.items() for n in names])
def test_every_file_composes_and_changes_only_its_own_keys(group, name):
    """So files of different groups cannot collide: that every combination composes follows from this test."""
    own = {group} | (GLOBAL_KEYS_OF_MODEL if group == "model" else set())
    assert changed_keys(checked(**{group: name}), compose()) <= own


def test_random_combinations_of_one_file_a_group_compose():
    draw = random.Random(0)
    for _ in range(25):
        checked(**{group: draw.choice(names) for group, names in GROUPS.items()})


@pytest.mark.parametrize("name", BACKENDS)
def test_loss_files_take_every_option_from_the_top_level_keys(name):
    loss = OmegaConf.to_container(compose(f"loss={name}"), resolve=False)["loss"]
    assert loss["_target_"] == f"logitless.losses.{name}"
    for key in ("ignore_index", "label_smoothing", "z_loss", "softcap"):
        assert loss["objective"][key] == f"${{{key}}}"


@pytest.fixture
def nothing_is_built(monkeypatch):
    def built(*args, **kwargs):
        raise AssertionError("a model was built before the value was refused")

    monkeypatch.setattr(fit, "LanguageModel", built)
    monkeypatch.setattr("logitless.model.GPT.__init__", built)


REFUSED = [
    ("chunk=0", "chunk=0"),
    ("chunk=automatic", "chunk=automatic"),
    ("budget_mib=0", "budget_mib=0"),
    ("budget_mib=true", "budget_mib=True"),
    ("budget_mib=nan", "budget_mib=nan"),
    ("budget_mib=1e-3", "budget_mib=0.001: no plan fits into 0.001 MiB with chunk=1024"),
    ("data.validation=0", "data.validation=0"),
    ("data.validation=1.5", "data.validation=1.5"),
    ("data.validation=a_split", "data.validation=a_split"),
    ("model.mlp=relu", "model.mlp=relu"),
    ("chunk=true", "chunk=True"),
    ("model.tied=no", "model.tied=no"),
    ("model.head_bias=null", "model.head_bias=None"),
    ("tokenizer.vocab_size=100", "tokenizer.vocab_size=100"),
    ("data.document_start='['", "data.document_start=["),
    ("seed=4294967296", "seed=4294967296"),
    ("precision=16-mixed", "precision=16-mixed needs a GPU"),
    ("chunk=1.5", "chunk=1.5"),
    ("seq_len=1e3", "seq_len=1000.0"),
    ("seq_len=null", "seq_len=None"),
    ("batch_size=-1", "batch_size=-1"),
    ("accumulate=0", "accumulate=0"),
    ("max_steps=0", "max_steps=0"),
    ("val_every=0", "val_every=0"),
    ("seed=-1", "seed=-1"),
    ("lr=0", "lr=0"),
    ("lr=nan", "lr=nan"),
    ("lr=inf", "lr=inf"),
    ("lr=fast", "lr=fast"),
    ("grad_clip=0", "grad_clip=0"),
    ("min_lr_ratio=1.5", "min_lr_ratio=1.5"),
    ("weight_decay=-0.1", "weight_decay=-0.1"),
    ("betas=[0.9]", "betas="),
    ("betas=[0.9,1.0]", "betas="),
    ("precision=fp8", "precision=fp8"),
    ("model.dropout=2", "model.dropout=2"),
    ("model.width=15", "model.width=15"),
    ("model.mlp=relu", "model.mlp"),
    ("model.padded_vocab_size=100", "model.padded_vocab_size=100"),
    ("model.padded_vocab_size=64", "model.padded_vocab_size=64"),
    ("label_smoothing=1.5", "label_smoothing"),
    ("label_smoothing=much", "label_smoothing"),
    ("label_smoothing=nan", "label_smoothing"),
    ("z_loss=-1", "z_loss"),
    ("z_loss=null", "z_loss"),
    ("softcap=0", "softcap"),
    ("softcap=true", "softcap"),
    ("ignore_index=0.5", "ignore_index"),
    ("ignore_index=null", "ignore_index"),
    ("data.path=/no/such/file.txt", "data.path=/no/such/file.txt"),
    ("data.path=???", "data.path"),
    ("data.validation=0", "data.validation=0"),
]


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize(("override", "named"), REFUSED)
def test_a_wrong_value_is_refused_by_name_before_a_model_is_built(override, named, tmp_path):
    with pytest.raises(ValueError, match=re.escape(named)):
        job.prepare(tiny(tmp_path, override))


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("override", ["chunk=auto", "budget_mib=100"])
def test_a_cut_vocabulary_takes_a_chunk_and_no_budget(override, tmp_path):
    job.prepare(tiny(tmp_path, override, "trainer=tp_vocab", "loss=inplace"))
    with pytest.raises(ValueError, match=re.escape(override.split("=")[1]) + ".*trainer=tp_vocab makes no plan"):
        job.prepare(tiny(tmp_path, override, "trainer=tp_vocab"))


@pytest.mark.usefixtures("nothing_is_built")
@pytest.mark.parametrize("budget_mib", [1.0, 3.0, 4.0])
def test_a_budget_must_suffice_for_training_and_for_validation(budget_mib, tmp_path):
    """384 tokens, 6400 classes: training by slabs of 1792 classes holds 2.7 MiB, validation by 128 tokens 3.1 MiB."""
    shape = ("seq_len=192", "model.padded_vocab_size=6400", "tokenizer.vocab_size=300")
    config = tiny(tmp_path, "chunk=auto", f"budget_mib={budget_mib}", *shape)
    if budget_mib == 4.0:
        assert job.prepare(config).plan.transient_bytes <= 4.0 * 2**20
    else:
        with pytest.raises(ValueError, match=re.escape(f"budget_mib={budget_mib}: no plan fits")):
            job.prepare(config)


def test_no_backend_but_fused_minds_a_budget(tmp_path):
    for name in set(BACKENDS) - {"fused"}:
        job.prepare(tiny(tmp_path, f"loss={name}", "budget_mib=1e-3"))


@pytest.mark.usefixtures("nothing_is_built")
def test_a_missing_path_is_refused_by_name(tmp_path):
    given = [override for override in overrides(tmp_path) if not override.startswith("data.path")]
    with pytest.raises(ValueError, match=r"data\.path must be given"):
        job.prepare(compose(*given))


def test_an_unknown_loss_is_refused_with_the_list_of_those_that_exist():
    with pytest.raises(MissingConfigException) as refusal:
        compose("loss=nonesuch")
    assert all(name in str(refusal.value) for name in BACKENDS)


def test_an_unknown_key_is_refused():
    with pytest.raises(Exception, match="chunks"):
        compose("chunks=7")


def test_the_sample_configuration_of_the_tests_is_itself_accepted(tmp_path):
    check_train_config(tiny(tmp_path))
    assert Path(tiny(tmp_path).data.path).is_file()
