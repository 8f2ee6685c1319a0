"""Files of residual networks: torchvision's names, our own folder, and files that are none."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from allmask.errors import CheckpointError, ResourceError
from allmask.gan import networks as gans
from allmask.gan.networks import PRESETS, Gan, GanConfig
from allmask.nn.heads import Labels
from allmask.vision.checkpoints import TORCHVISION, load, renamed, save, to_torchvision
from allmask.vision.resnet import ResNetConfig, fresh, plain, shape_of, small
from tests.vision.test_resnet import RESNET18, RESNET50, TINY, VARIANTS, images, randomised, variants

NAMES_OF_RESNET18 = """
    conv1.weight bn1.weight bn1.bias bn1.running_mean bn1.running_var bn1.num_batches_tracked layer1.0.conv1.weight
    layer1.0.bn1.weight layer1.1.bn2.num_batches_tracked layer2.0.downsample.0.weight layer2.0.downsample.1.weight
    layer2.0.downsample.1.running_var layer4.1.conv2.weight layer4.1.bn2.bias fc.weight fc.bias
"""  # some of what `torchvision.models.resnet18().state_dict()` has


def same(first, second):
    a, b = first.state_dict(), second.state_dict()
    return list(a) == list(b) and all(x.dtype == b[n].dtype and torch.equal(x, b[n]) for n, x in a.items())


def tensors(config=TINY):
    return to_torchvision(randomised(fresh(config)))


def written(path, state):
    (torch.save if path.suffix == ".pth" else save_file)(state, path)
    return path


# ---- torchvision's names -------------------------------------------------------------------------------------------


def test_names():
    ours = shape_of(RESNET18).state_dict()
    theirs = to_torchvision(shape_of(RESNET18))
    assert set(NAMES_OF_RESNET18.split()) <= set(theirs) and len(theirs) == len(ours) == 122
    assert [renamed(name) for name in theirs] == list(ours)
    deep = to_torchvision(shape_of(RESNET50))
    assert len(deep) == 320 and {"layer1.0.downsample.0.weight", "layer4.2.bn3.running_mean"} <= set(deep)
    assert deep["layer1.0.downsample.0.weight"].shape == (256, 64, 1, 1)
    assert deep["layer2.0.conv2.weight"].shape == (128, 128, 3, 3) and deep["fc.weight"].shape == (1000, 2048)


def test_the_table_reads_both_ways():
    assert all(theirs.count("*") == ours.count("*") for theirs, ours in TORCHVISION)
    assert renamed("layer1.0.conv4.weight") is None and renamed("xconv1.weight") is None
    assert renamed("conv1_weight") is None and renamed("conv1.weight.extra") is None


@variants
def test_a_file_shows_its_network(tmp_path, config):
    """But for the two things that the page says it cannot show."""
    state = tensors(config)
    file = written(tmp_path / "a.safetensors", state)
    shown = load(file).model.config
    assert shown == replace(config, early_stride=False, shortcut="A" if config.shortcut == "none" else config.shortcut)
    model = load(file, config).model
    assert model.config == config and not model.training
    assert all(torch.equal(state[name], tensor) for name, tensor in to_torchvision(model).items())
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("config", [RESNET18, RESNET50, small(20)], ids=lambda c: str(c.depth))
def test_real_sizes(tmp_path, config):
    state = tensors(config)
    model = load(written(tmp_path / "a.safetensors", state)).model
    assert model.config == config
    assert all(torch.equal(state[name], tensor) for name, tensor in to_torchvision(model).items())


def test_old_files(tmp_path):
    """Saved before torch counted batches, in the format before 2020, from DataParallel."""
    state = {f"module.{name}": x for name, x in tensors().items() if "num_batches" not in name}
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    model, expected = load(tmp_path / "old.pth").model, randomised(fresh(TINY))
    assert same(model, expected)
    with torch.no_grad():
        assert torch.equal(model(images(1, 3, 32, 32)), expected(images(1, 3, 32, 32)))
    model.train()(images(2, 3, 32, 32))
    assert model.stem.norm.num_batches_tracked == 1


def test_counters_are_kept_where_they_are_any(tmp_path):
    state = tensors()
    state["bn1.num_batches_tracked"], state["fc.num_batches_tracked"] = torch.tensor(7), torch.tensor(1)
    state["layer1.0.bn1.num_batches_tracked"] = torch.tensor([1.0, 2.0])
    model = load(written(tmp_path / "a.pth", state)).model
    assert model.stem.norm.num_batches_tracked == 7
    assert model.state_dict()["stages.1.layers.0.branch.0.norm.num_batches_tracked"] == 0


def test_other_types_stay(tmp_path):
    state = {name: x.half() if x.is_floating_point() else x for name, x in tensors().items()}
    model = load(written(tmp_path / "a.safetensors", state)).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float16}


# ---- our own folder ------------------------------------------------------------------------------------------------


@variants
def test_out_and_back(tmp_path, config):
    model = randomised(fresh(config))
    save(tmp_path / "m", model)
    again = load(tmp_path / "m")
    assert same(model, again.model) and again.model.config == config and again.labels is None
    assert [file.name for file in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("change", [lambda m: m.bfloat16(), lambda m: m.to(memory_format=torch.channels_last)])
def test_out_and_back_in_other_forms(tmp_path, change):
    model = change(randomised(fresh(TINY)))
    save(tmp_path / "m", model, Labels("single", ("猫", "狗", "bird", "car", "plane")))
    again = load(tmp_path / "m")
    assert same(model, again.model)
    assert again.labels == Labels("single", ("猫", "狗", "bird", "car", "plane"))


def test_a_trained_one_goes_on_as_it_was(tmp_path):
    model = fresh(TINY, torch.Generator().manual_seed(0))
    model.train()(images(8, 3, 32, 32))
    save(tmp_path / "m", model)
    again = load(tmp_path / "m").model
    assert same(model, again) and again.stem.norm.num_batches_tracked == 1
    with torch.no_grad():
        assert torch.equal(again(images(2, 3, 32, 32)), model.eval()(images(2, 3, 32, 32)))


def test_a_folder_is_never_overwritten(tmp_path):
    model = fresh(TINY)
    (tmp_path / "empty").mkdir()
    save(tmp_path / "empty", model)
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "empty", model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="exists already"):
        save(tmp_path / "file", model)
    with pytest.raises(ResourceError, match="cannot be written"):
        save(tmp_path / "file" / "below", model)


@pytest.mark.parametrize("save_one", [lambda at: save(at, fresh(TINY)), lambda at: gans.save(at, gan())])
def test_a_full_disk_leaves_nothing(tmp_path, monkeypatch, save_one):
    def full(tensors, path, metadata):
        path.write_bytes(b"half of it")
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(ResourceError, match=r"cannot be written: .*No space left"):
        save_one(tmp_path / "m")
    assert not any(tmp_path.iterdir())


def gan() -> Gan:
    return Gan(GanConfig("toy", (1,), **PRESETS["toy"]))


def test_labels_that_do_not_fit(tmp_path):
    with pytest.raises(CheckpointError, match="2 labels for 5 classes"):
        save(tmp_path / "m", fresh(TINY), Labels("single", ("a", "b")))
    assert not any(tmp_path.iterdir())


# ---- files that are none -------------------------------------------------------------------------------------------


def refused(path, *words, config=None):
    with pytest.raises(CheckpointError) as error:
        load(path, config)
    assert error.value.exit_code == 4
    for word in (path.name, *words):
        assert word in str(error.value)
    return str(error.value)


def test_missing_unknown_and_misshapen_tensors_are_listed(tmp_path):
    state = tensors()
    state["layer1.0.conv9.weight"] = state["conv1.weight"].clone()
    refused(written(tmp_path / "a.pth", state), "1 of ", "layer1.0.conv9.weight", "such as conv1.weight")
    state = tensors()
    del state["layer3.1.bn2.running_var"], state["fc.bias"]
    state["layer2.0.conv2.weight"] = torch.zeros(8, 8, 1, 1)
    state["bn1.bias"] = torch.zeros(4, dtype=torch.int64)
    text = refused(written(tmp_path / "b.safetensors", state), "4 tensors do not fit a ResNet of 12 layers")
    assert (
        "missing     head.bias" in text and "branch.1.norm.running_var" in text and "wrong type  stem.norm.bias" in text
    )
    assert "misshapen   stages.2.layers.0.branch.1.conv.weight  expected [8, 8, 3, 3], found [8, 8, 1, 1]" in text


def test_a_gap_in_the_numbers(tmp_path):
    state = {name.replace("layer3.1.", "layer3.2."): x for name, x in tensors().items()}
    refused(written(tmp_path / "a.pth", state), "missing", "do not fit")
    state = {name.replace("layer3.", "layer4."): x for name, x in tensors().items()}
    refused(written(tmp_path / "b.pth", state), "do not fit")
    state = {name.replace("layer3.1.", "layer3.999999999999."): x for name, x in tensors().items()}
    refused(written(tmp_path / "c.pth", state), "do not fit")


def test_another_kind_of_network(tmp_path):
    refused(written(tmp_path / "a.pth", {"bert.weight": torch.zeros(2)}), "1 of 1 tensors", "bert.weight")
    refused(written(tmp_path / "b.pth", {}), "no ResNet")
    refused(written(tmp_path / "c.pth", {"conv1.weight": torch.zeros(3), "fc.weight": torch.zeros(2, 2)}), "no ResNet")
    wide = {
        n: torch.zeros(16, 16, 1, 1) if "conv3" in n else x for n, x in tensors(VARIANTS["bottleneck-B-large"]).items()
    }
    refused(written(tmp_path / "d.pth", wide), "of another kind of network")
    refused(written(tmp_path / "e.pth", tensors()), "do not fit", config=plain(small(20)))


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


def test_nothing_in_a_file_runs(tmp_path, capsys):
    torch.save({"conv1.weight": Evil()}, tmp_path / "a.pth")
    refused(tmp_path / "a.pth", "nothing was run")
    (tmp_path / "b.pth").write_bytes(pickle.dumps(Evil(), protocol=2))
    refused(tmp_path / "b.pth")
    assert "ran" not in capsys.readouterr().out


@pytest.mark.parametrize("ending", ["pth", "safetensors"])
def test_damaged_files(tmp_path, ending):
    file = written(tmp_path / f"a.{ending}", tensors())
    whole = file.read_bytes()
    for content in (b"", whole[:100], whole[: len(whole) // 2], b"\0" * 1000):
        file.write_bytes(content)
        refused(file)


def test_what_is_no_file_of_weights(tmp_path):
    refused(tmp_path / "nothing.pth", "does not exist")
    (tmp_path / "a.txt").write_text("x")
    refused(tmp_path / "a.txt", "not a file of weights")
    refused(tmp_path, "no config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bert"}, "expected allmask-resnet"),
        ({"blocks": "many"}, "blocks is 'many'"),
        ({"blocks": [10**9]}, "blocks is"),
        ({"classes": None}, "classes is None"),
        ({"speed": 3}, "unknown settings: speed"),
        ({"labels": {"kind": "single", "names": ["a"]}}, "1 labels for 5 classes"),
        ({"labels": 3}, "labels is 3"),
        ({"shortcut": []}, "shortcut is"),
    ],
)
def test_settings_that_are_none(tmp_path, change, words):
    save(tmp_path / "m", fresh(TINY))
    file = tmp_path / "m" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(CheckpointError, match=words) as error:
        load(tmp_path / "m")
    assert "config.json" in error.value.message


def test_settings_that_lack(tmp_path):
    save(tmp_path / "m", fresh(TINY))
    (tmp_path / "m" / "config.json").write_text('{"model_type": "allmask-resnet", "blocks": [2]}')
    with pytest.raises(CheckpointError, match="no bottleneck, channels, classes"):
        load(tmp_path / "m")


def test_weights_of_other_settings(tmp_path):
    save(tmp_path / "m", fresh(TINY))
    save(tmp_path / "n", fresh(ResNetConfig((1, 1), (4, 8))))
    (tmp_path / "n" / "model.safetensors").replace(tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match="do not fit"):
        load(tmp_path / "m")
