"""Model files: what comes back, what is refused, and what a failed save leaves."""

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

import varprop as vp
from varprop.io import files as modelfile
from varprop.io.objective import LAYERS, describe_method, describe_net, make_net
from varprop.methods.rules.shape import moved
from varprop.table.model import TableModel


def mlp(**options: object) -> nn.Sequential:
    return vp.variational(nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 2)), **options)


def image_net() -> nn.Sequential:
    features = nn.Sequential(
        nn.Conv2d(1, 4, (3, 5), stride=2, padding=1, bias=False),
        nn.LeakyReLU(0.2),
        nn.MaxPool2d(2),
        nn.Dropout(0.1),
    )
    net = nn.Sequential(features, nn.AvgPool2d(2, ceil_mode=True), nn.Flatten(), nn.Linear(16, 3))
    return vp.variational(net, where=lambda name, layer: name == "0.0", posterior="factored")


def objective(
    net: nn.Module,
    method: vp.Method = vp.VBP,
    likelihood: vp.likelihoods.Likelihood | None = None,
    **options: object,
) -> vp.ELBO:
    prior = options.pop("prior", vp.priors.Normal(10.0))
    return vp.ELBO(
        net, method, likelihood or vp.likelihoods.Normal(3.0, outputs=2), prior, n_data=7, **options
    ).eval()


def assert_same(a: vp.ELBO, b: vp.ELBO, x: Tensor, y: Tensor) -> None:
    assert a.state_dict().keys() == b.state_dict().keys()
    assert all(torch.equal(value, b.state_dict()[name]) for name, value in a.state_dict().items())
    torch.manual_seed(0)
    expected = a.terms(x, y)
    torch.manual_seed(0)
    got = b.terms(x, y)
    assert torch.equal(a.loss(expected), b.loss(got))
    assert torch.equal(expected.kl, got.kl)


X, Y = torch.linspace(-1, 1, 12).view(4, 3), torch.linspace(0, 1, 8).view(4, 2)


@pytest.mark.parametrize(
    "elbo",
    [
        objective(mlp()),
        objective(mlp(biases=True), vp.vbp(slope=7.0), kl_z_weight=0.1, prior=vp.priors.LogUniform()),
        objective(mlp(posterior="factored"), vp.DVI, prior=vp.priors.EmpiricalBayes((1.0, 10.0))),
        objective(mlp(posterior="horseshoe"), vp.DVI, prior=vp.priors.Horseshoe(0.5)),
        objective(mlp(), vp.DVI, prior=vp.priors.Tempered(vp.priors.FanIn(4.0), 0.03)),
        objective(mlp(), vp.LOCAL_REPARAM, vp.likelihoods.MultiLabel("bound")),
        objective(nn.Sequential(nn.Linear(3, 2)), vp.DETERMINISTIC),
        objective(mlp(), vp.PBP),
        objective(mlp(), vp.DVI, moments="correlated"),
        objective(mlp().double()),
    ],
    ids=lambda elbo: f"{elbo.method.name} {type(elbo.prior).__name__}",
)
def test_comes_back_as_it_was(elbo: vp.ELBO, tmp_path: Path) -> None:
    vp.save(elbo, tmp_path / "model")
    again = vp.load(tmp_path / "model")
    assert (again.n_data, again.kl_z_weight, again.moments, again.prior, again.method.name) == (
        7,
        elbo.kl_z_weight,
        elbo.moments,
        elbo.prior,
        elbo.method.name,
    )
    dtype = next(elbo.parameters()).dtype
    assert_same(elbo, again, X.to(dtype), Y.to(dtype))
    assert all(p.requires_grad for p in again.parameters())


def test_rebuilds_nested_networks_with_partly_random_layers(tmp_path: Path) -> None:
    elbo = objective(image_net(), likelihood=vp.likelihoods.Categorical("mackay"))
    vp.save(elbo, tmp_path)
    again = vp.load(tmp_path)
    assert str(again.net) == str(elbo.net)
    assert [name for name, _ in vp.posteriors(again.net)] == ["0.0.weight"]
    assert again.likelihood.approximation == "mackay"
    assert_same(elbo, again, torch.randn(4, 1, 16, 16), torch.tensor([0, 2, 1, 0]))


@pytest.mark.parametrize("name", sorted(LAYERS))
def test_every_layer_of_the_list_is_described_by_its_arguments(name: str) -> None:
    needed = {
        "Linear": (3, 5),
        "Conv": (2, 4, 3),
        "Unflatten": (1, (2, 3)),
        "LayerNorm": ((4,),),
        "GroupNorm": (2, 4),
        "BatchNorm": (4,),
    }
    needed |= {
        "MaxPool": (3,),
        "AvgPool": (3,),
        "Adaptive": (2,),
        "InstanceNorm": (4,),
        "RMSNorm": ((4,),),
        "Embedding": (5, 3),
        "Pieces": ((0, 0, 1),),
    }
    needed |= {
        "ConstantPad": (1, 2.5),
        "Zero": (1,),
        "Reflection": (1,),
        "Replication": (1,),
        "Circular": (1,),
        "Unfold": (3,),
        "Pixel": (2,),
        "Channel": (2,),
    }
    needed |= {
        "Upsample": (None, (2, 1.5), "bilinear"),
        "Upsampling": (None, 2),
        "Softmax2d": (),
        "Softmax": (1,),
        "LogSoftmax": (1,),
        "Softmin": (1,),
    }
    layer = LAYERS[name](*next((values for prefix, values in needed.items() if name.startswith(prefix)), ()))
    description = json.loads(json.dumps(describe_net(layer)))
    assert repr(make_net(description)) == repr(layer)


class Residual(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


def test_asks_for_parts_it_cannot_describe(tmp_path: Path) -> None:
    class Poisson(vp.likelihoods.Likelihood):
        def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
            return y * f - f.exp() - torch.lgamma(y + 1)

    def net() -> nn.Module:
        return vp.variational(nn.Sequential(Residual(nn.Linear(3, 3)), nn.Linear(3, 2)))

    method = vp.VBP | {Residual: lambda method, module, x: x}
    elbo = objective(net(), method, Poisson())
    vp.save(elbo, tmp_path)
    with pytest.raises(
        vp.ModelFileError, match=r"does not describe its net; pass it, as in load\(folder, net=...\)"
    ):
        vp.load(tmp_path)
    with pytest.raises(vp.ModelFileError, match="does not describe its method"):
        vp.load(tmp_path, net())
    assert_same(elbo, vp.load(tmp_path, net(), method=method, likelihood=Poisson()), X, Y)
    with pytest.raises(vp.ModelFileError, match="does not fit its weights or the parts given"):
        vp.load(tmp_path, mlp(), method=method, likelihood=Poisson())


def test_every_layer_without_parts_that_has_a_rule_can_be_saved() -> None:
    """Attention and recurrent layers are given to `load` as a network."""
    own = {"Module", "Sequential", "ModuleList", "MultiheadAttention", "RNN", "LSTM", "GRU"}
    own |= {"TransformerEncoderLayer", "TransformerEncoder", "RNNCell", "LSTMCell", "GRUCell"}
    of_the_estimators = {"Pieces"}
    assert {key.__name__ for key in vp.DVI.rules if isinstance(key, type)} - own == (
        LAYERS.keys() - of_the_estimators
    )


def test_a_replaced_rule_or_a_layer_used_twice_is_not_described() -> None:
    assert describe_method(vp.VBP | {}) is not None
    assert describe_method(vp.VBP | {nn.ReLU: moved}) is None
    twice = nn.Linear(3, 3)
    assert describe_net(nn.Sequential(twice, twice)) is None


def test_preprocessing_is_kept(tmp_path: Path) -> None:
    vp.save(
        objective(mlp()),
        tmp_path,
        preprocessing={"classes": ["a", "ü"], "scale": (0.1, 1e-300), "nested": {"none": None, 3: True}},
    )
    assert modelfile.preprocessing(tmp_path) == {
        "classes": ["a", "ü"],
        "scale": [0.1, 1e-300],
        "nested": {"none": None, "3": True},
    }
    with pytest.raises(vp.ModelFileError, match="cannot be written as JSON"):
        vp.save(objective(mlp()), tmp_path, preprocessing={"a": object()})
    with pytest.raises(vp.ModelFileError, match="cannot be written as JSON"):
        vp.save(objective(mlp()), tmp_path, preprocessing={"a": float("nan")})


# -------------------------------------------------------------------------------------------- what is refused


OLD = Path(__file__).parent / "models_0_1"


@pytest.mark.parametrize("name", ["elbo", "regressor", "table"])
def test_models_of_varprop_0_1_predict_as_they_did(name: str) -> None:
    expected = json.loads((OLD / "expected.json").read_text())[name]
    if name == "elbo":
        p = vp.load(OLD / name).predict(torch.linspace(-1, 1, 8).view(2, 1, 4))
        got = {"mean": p.mean, "var": p.var}
    elif name == "regressor":
        mean, std = vp.load(OLD / name).predict(expected.pop("x"), return_std=True)
        got = {"mean": mean, "std": std}
    else:
        rows = pd.DataFrame({"area": [1.0, 3.0, None], "town": ["Ulm", None, "Bonn"]})
        p = TableModel.load(OLD / name).predict(rows)
        got = {"mean": p.mean.squeeze(1), "std": p.std.squeeze(1)}
    assert got.keys() == expected.keys()
    for key, values in expected.items():
        np.testing.assert_allclose(got[key], values, rtol=2e-6)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    vp.save(objective(mlp()), tmp_path / "model", preprocessing={"names": ["a"]})
    return tmp_path / "model"


def weights(folder: Path) -> Path:
    return next(folder.glob("*.safetensors"))


def refused(folder: Path, reason: str) -> None:
    with pytest.raises(vp.ModelFileError, match=reason) as error:
        vp.load(folder)
    assert "\n" not in str(error.value)


def test_every_truncation_and_changed_byte_is_refused(folder: Path) -> None:
    for path in (folder / "model.json", weights(folder)):
        whole = path.read_bytes()
        for cut in (0, 1, len(whole) // 3, len(whole) - 1):
            path.write_bytes(whole[:cut])
            refused(folder, "damaged|checksum|did not write")
        for place in range(0, len(whole), 41):
            if not whole[place : place + 1].isspace():
                path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
                refused(folder, "damaged|checksum|did not write|upgrade|lacks")
        path.write_bytes(whole)
    vp.load(folder)


def test_missing_and_foreign_files_are_refused(folder: Path, tmp_path: Path) -> None:
    refused(tmp_path / "nowhere", "has no readable model.json")
    (tmp_path / "file").write_text("x")
    refused(tmp_path / "file", "has no readable model.json")
    weights(folder).unlink()
    refused(folder, "lacks its weights")
    for text in (
        "[]",
        "3",
        '"x"',
        "null",
        "{}",
        '{"format": 1}',
        '{"format": "1", "sha256": "../../etc/passwd"}',
        "[" * 100_000,
    ):
        (folder / "model.json").write_text(text)
        refused(folder, "did not write|damaged")
    (folder / "model.json").write_bytes(b"\xff\xfe")
    refused(folder, "damaged")


def rewrite(folder: Path, change: dict[str, object], content: bytes | None = None) -> None:
    """A file that somebody made with care: every checksum right."""
    description = json.loads((folder / "model.json").read_text())
    del description["sha256"]
    for path, value in change.items():
        *parents, last = path.split("/")
        place = description
        for parent in parents:
            place = place[parent]
        place[last] = value
    content = weights(folder).read_bytes() if content is None else content
    checksum = modelfile._checksum(description, content)
    weights(folder).unlink()
    modelfile._weights(folder, checksum).write_bytes(content)
    (folder / "model.json").write_text(json.dumps({"sha256": checksum, **description}))


def test_a_newer_format_says_to_upgrade(folder: Path) -> None:
    rewrite(folder, {"format": 5, "varprop": "9.9"})
    refused(folder, "was written by varprop 9.9 in format 5, this version reads up to 4; upgrade varprop")


class Boom:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("touch boom",)


@pytest.mark.parametrize(
    "change",
    [
        {"objective/net/layers/0/type": "os.system"},
        {"objective/net/layers/0/type": "Bilinear"},
        {"objective/net/layers/0/arguments": {"command": "touch boom"}},
        {"objective/net/layers/0/arguments/in_features": 10**12},
        {"objective/method/name": "__class__"},
        {"objective/method": {"name": "vbp", "slope": -1.0}},
        {"objective/likelihood/type": "Likelihood"},
        {"objective/prior/type": "Prior"},
        {"objective/prior/arguments": {"precision": -1}},
        {"objective/n_data": 0},
        {"objective": None},
    ],
    ids=str,
)
def test_a_forged_description_is_refused(folder: Path, change: dict[str, object]) -> None:
    rewrite(folder, change)
    refused(folder, "does not fit its weights")


def test_no_pickle_is_ever_read(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rewrite(folder, {}, pickle.dumps(Boom()))
    refused(folder, "no safetensors")
    torch.save(Boom(), weights(folder))
    rewrite(folder, {}, weights(folder).read_bytes())
    refused(folder, "no safetensors")
    assert not (tmp_path / "boom").exists()


def test_weights_of_another_network_are_refused(folder: Path) -> None:
    other = objective(vp.variational(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 2))))
    rewrite(folder, {}, safetensors.torch.save(dict(other.state_dict())))
    refused(folder, "does not fit its weights")


# -------------------------------------------------------------------------------------------- saves that fail


def test_a_failed_save_leaves_the_old_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = vp.load(folder).state_dict()
    replace = os.replace
    for failing in (1, 2):
        calls = []

        def fail(source: str, target: str, failing: int = failing, calls: list[str] = calls) -> None:
            calls.append(target)
            if len(calls) == failing:
                raise OSError(28, "No space left on device")
            replace(source, target)

        monkeypatch.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            vp.save(objective(mlp()), folder)
        monkeypatch.undo()
        after = vp.load(folder).state_dict()
        assert all(torch.equal(after[name], value) for name, value in before.items())
        assert not list(folder.glob(".*"))
    vp.save(objective(mlp()), folder)
    assert len(list(folder.iterdir())) == 2


def test_a_failed_first_save_leaves_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(source: str, target: str) -> None:
        raise OSError(28, "No space left on device")

    (tmp_path / "there").mkdir()
    monkeypatch.setattr(os, "replace", fail)
    for folder in ("there/a/b", "there"):
        with pytest.raises(OSError, match="No space"):
            vp.save(objective(mlp()), tmp_path / folder)
        assert list(tmp_path.rglob("*")) == [tmp_path / "there"]


def test_a_save_leaves_other_files_alone(folder: Path) -> None:
    (folder / "notes.txt").write_text("mine")
    vp.save(objective(mlp()), folder)
    assert (folder / "notes.txt").read_text() == "mine"
    with pytest.raises(vp.ModelFileError, match="is a file; give a folder"):
        vp.save(objective(mlp()), folder / "notes.txt")
