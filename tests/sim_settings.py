from poseidon.planning.cluster import Cluster, Link
from poseidon.planning.profile import Profile, UnitProfile
from poseidon.sim.media import MEDIA
from poseidon.sim.setting import Setting
from poseidon.sim.systems import find_system
from poseidon.units import Load, ParameterSpec, Unit


def dense(name, values, forward_s=0.01, backward_s=0.02):
    unit = Unit(name, "dense", (ParameterSpec(f"{name}.weight", (values,), 4),))
    return UnitProfile(unit, None, forward_s, backward_s)


def linear(name, rows, columns, batch=32, forward_s=0.01, backward_s=0.02):
    parameters = (ParameterSpec(f"{name}.weight", (rows, columns), 4), ParameterSpec(f"{name}.bias", (rows,), 4))
    return UnitProfile(Unit(name, "linear", parameters), Load(batch), forward_s, backward_s)


def profile(*units, update_s=0.001, batch=32):
    order = tuple(range(len(units)))
    return Profile("made", "cpu", batch, tuple(units), order, order[::-1], update_s)


def small():
    """Convolutions with few values, then a large linear layer: the shape that the factors route is made for."""
    return profile(*(dense(f"conv{i}", 200_000 * (i + 1)) for i in range(5)), linear("fc", 4096, 2048))


def setting(given=None, machines=4, gbit=1.0, system="poseidon", latency_s=0.0, **changes):
    cluster = Cluster(machines, between=Link(gbit * 1e9, latency_s), flops=1e12)
    ideal = MEDIA["ideal"]
    changes = {"collectives": ideal, "messages": ideal, "payload": 1.0, **changes}
    return Setting(given or small(), cluster, find_system(system), **changes)
