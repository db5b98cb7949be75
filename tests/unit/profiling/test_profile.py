import pytest
import torch
from torch import nn

from poseidon.errors import ConfigError
from poseidon.planning.profile import Profile
from poseidon.profiling.measuring import estimate_profile, profile_model
from poseidon.profiling.prototxt import profile_prototxt
from poseidon.profiling.source import ProfileSource, find_profile
from poseidon.units import Load

NET = """
layer { name: "data" type: "Data" top: "data" top: "label" include { phase: TRAIN }
  transform_param { crop_size: 16 } data_param { source: "nowhere" batch_size: 4 } }
layer { name: "conv" type: "Convolution" bottom: "data" top: "conv"
  convolution_param { num_output: 8 kernel_size: 3 } }
layer { name: "relu" type: "ReLU" bottom: "conv" top: "conv" }
layer { name: "fc" type: "InnerProduct" bottom: "conv" top: "fc" inner_product_param { num_output: 10 } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "fc" bottom: "label" top: "loss" }
"""


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(50, 16)
        self.body = nn.Linear(16, 16)
        self.unused = nn.Linear(3, 3)

    def forward(self, indices):
        return nn.functional.linear(torch.tanh(self.body(self.tokens(indices))), self.tokens.weight)


@pytest.fixture
def measured():
    model = Tied()
    return profile_model(model, torch.arange(12).view(3, 4), name="tied", batch=3), model


def test_a_unit_is_ready_when_its_first_use_is_backpropagated(measured):
    profile, _ = measured
    names = [one.unit.name for one in profile.units]
    assert names == ["tokens", "body", "unused"]
    assert [names[i] for i in profile.forward_order[:2]] == ["tokens", "body"]
    ready = [names[i] for i in profile.ready_order]
    assert ready.index("body") < ready.index("tokens")


def test_times_add_up_and_nothing_is_left_behind(measured):
    profile, model = measured
    assert profile.step_s == pytest.approx(profile.forward_s + profile.backward_s + profile.update_s)
    assert min(profile.forward_s, profile.backward_s, profile.update_s) > 0
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_measuring_changes_no_weight():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    before = [p.clone() for p in model.parameters()]
    profile_model(model, torch.randn(3, 4), name="m", batch=3)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_those_who_share_a_device_meet_before_each_step_and_each_update():
    model = nn.Linear(4, 2)
    events = []
    model.register_forward_hook(lambda *_: events.append("forward"))
    meet, update = (lambda: events.append("meet")), (lambda: events.append("update"))
    profile_model(model, torch.randn(3, 4), name="m", batch=3, update=update, meet=meet, repetitions=2)
    timed = events[events.index("meet") :]
    assert timed == ["meet", "forward", "meet", "update"] * (len(timed) // 4)


def test_the_wait_for_others_counts_neither_as_backward_nor_as_update(monkeypatch):
    now_s = [0.0]
    monkeypatch.setattr("poseidon.profiling.measuring.time.perf_counter", lambda: now_s[0])

    def pass_s(seconds):
        now_s[0] += seconds

    profile = profile_model(
        nn.Linear(4, 2),
        torch.randn(3, 4),
        name="m",
        batch=3,
        update=lambda: pass_s(2.0),
        meet=lambda: pass_s(60.0),
    )
    assert profile.step_s == profile.update_s == 2.0


def test_under_autocast_gradients_are_ready_one_after_the_other():
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    gradients = []
    for number, layer in enumerate(model):
        layer.weight.register_post_accumulate_grad_hook(lambda _, number=number: gradients.append(number))
        layer.register_full_backward_pre_hook(lambda *_, number=number: gradients.append(-number))
    around = lambda: torch.autocast("cpu", torch.bfloat16)  # noqa: E731
    inputs = torch.randn(16, 64, requires_grad=True)
    profile = profile_model(model, inputs, name="m", batch=16, around=around)
    last = gradients[-16:]
    assert last == [each for number in reversed(range(8)) for each in (-number, number)]
    assert all(one.load == Load(16, 2) for one in profile.units)


def test_a_file_holds_all_of_it(measured, tmp_path):
    profile, _ = measured
    profile.save(tmp_path / "p.json")
    assert Profile.load_file(tmp_path / "p.json") == profile


def test_estimates_count_operations_where_they_happen():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 10)).to("meta")
    images = torch.empty(4, 3, 8, 8, device="meta")
    profile = estimate_profile(model, images, name="m", batch=4, flops=1e9, memory_bytes_per_s=1e18)
    conv, linear = profile.units
    assert conv.forward_s * 1e9 == pytest.approx(2 * 4 * 64 * 8 * 27)
    assert linear.forward_s * 1e9 == pytest.approx(2 * 4 * 512 * 10)
    assert linear.load == Load(4)
    assert profile.backward_s == pytest.approx(2 * profile.forward_s)


def test_scaling_keeps_proportions(measured):
    profile, _ = measured
    scaled = profile.scaled_to(1.0)
    assert scaled.step_s == pytest.approx(1.0)
    assert scaled.forward_s / scaled.backward_s == pytest.approx(profile.forward_s / profile.backward_s)
    double = profile.with_batch(6)
    assert double.forward_s == pytest.approx(2 * profile.forward_s)
    assert double.update_s == profile.update_s
    assert double.loads["body"].rows == 2 * profile.loads["body"].rows
    with pytest.raises(ConfigError, match="batch is 0"):
        profile.with_batch(0)
    with pytest.raises(ConfigError, match="positive time"):
        profile.scaled_to(0.0)


def test_a_prototxt_needs_no_database(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    profile = profile_prototxt(path, 32, 1e9)
    conv, fc = profile.units
    assert [conv.unit.kind, fc.unit.kind] == ["dense", "linear"]
    assert fc.load == Load(32)
    assert fc.unit.matrix == (10, 8 * 14 * 14)
    assert conv.forward_s * 1e9 >= 32 * 2 * 14 * 14 * 8 * 27
    assert profile.batch == 32


def test_a_deploy_net_can_be_planned_too(tmp_path):
    path = tmp_path / "deploy.prototxt"
    head = 'layer { name: "data" type: "Input" top: "data" input_param { shape { dim: 9 dim: 3 dim: 16 dim: 16 } } }'
    path.write_text(head + NET[NET.index('layer { name: "conv"') : NET.index('layer { name: "loss"')])
    profile = profile_prototxt(path, 32, 1e9)
    assert [one.unit.name for one in profile.units] == ["conv", "fc"]
    assert profile.loads["fc"].rows == 32


def test_a_prototxt_can_be_measured(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET)
    profile = find_profile(ProfileSource(str(path), 4, flops=1e9, is_measured=True))
    assert (profile.source, profile.device, profile.batch) == ("measured", "cpu", 4)
    assert profile.forward_s > 0


def test_a_net_whose_data_are_missing_says_what_to_try(tmp_path):
    path = tmp_path / "net.prototxt"
    path.write_text(NET.replace("transform_param { crop_size: 16 }", ""))
    with pytest.raises(ConfigError, match="deploy form"):
        profile_prototxt(path, 32, 1e9)


def test_a_profile_belongs_to_its_model(measured):
    profile, model = measured
    profile.check_model(profile.specs)
    plain = profile.to_dict()
    short = Profile.from_dict({**plain, "units": plain["units"][:2], "forward_order": [0, 1], "ready_order": [1, 0]})
    with pytest.raises(ConfigError, match="lacks the model's unit 'unused'"):
        short.check_model(profile.specs)
    model.body = nn.Linear(16, 17)
    from poseidon.engine.discover import find_units

    with pytest.raises(ConfigError, match="unit 'body' has shapes"):
        profile.check_model([unit.spec for unit in find_units(model)])


def test_sources_are_checked():
    with pytest.raises(ConfigError, match="--batch is 0"):
        ProfileSource("lenet", 0)
    with pytest.raises(ConfigError, match="matrix rate is -1"):
        ProfileSource("lenet", flops=-1)
    with pytest.raises(ConfigError, match="neither module:callable nor"):
        find_profile(ProfileSource("lenett", flops=1e9))
    with pytest.raises(ConfigError, match="cannot load nowhere:make"):
        find_profile(ProfileSource("nowhere:make", flops=1e9))
    with pytest.raises(ConfigError, match="':make' is neither module:callable nor"):
        find_profile(ProfileSource(":make", flops=1e9))
    with pytest.raises(ConfigError, match="math:pi is a float, expected a callable"):
        find_profile(ProfileSource("math:pi", flops=1e9))


def test_a_files_name_in_place_of_a_modules_is_answered_with_the_modules(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mynet.py").write_text("")
    with pytest.raises(ConfigError, match=r"a module is named without its \.py: mynet:make"):
        find_profile(ProfileSource("mynet.py:make", flops=1e9))


def test_a_network_of_the_zoo_can_be_estimated_and_measured():
    estimated = find_profile(ProfileSource("lenet", 4, flops=1e9))
    measured = find_profile(ProfileSource("lenet", 4, flops=1e9, is_measured=True))
    assert estimated.specs == measured.specs
    assert (estimated.source, measured.source) == ("estimated", "measured")
