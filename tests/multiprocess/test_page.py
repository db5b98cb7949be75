"""The page in a real browser: on a made-up run full of markup, as it changes, and on a job that runs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import browsing, text_of, until, why_no_browser
from made_runs import EVIL, make_run
from poseidon.observe.folder import EVENTS, STATE, SUMMARY, read_events, read_json
from poseidon.observe.page.server import PageServer

PROGRAM = """
import sys, time, torch, poseidon
poseidon.init()
net = torch.nn.Linear(64, 64)
model = poseidon.DistributedDataParallel(net, trials=False)
optimizer = torch.optim.SGD(net.parameters(), 0.001)
step = 0
while step < int(open(sys.argv[1]).read()):
    loss = model(torch.randn(8, 64)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.15 if torch.distributed.get_rank() == 1 else 0.01)
    if step % 20 == 0:
        print("step", step, "loss", loss.item(), flush=True)
    step += 1
"""


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    reason = why_no_browser()
    if reason:
        pytest.skip(reason)
    with browsing(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_browser_shows_a_run_and_its_words_stay_words(driver: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    server = PageServer(folder)
    try:
        driver.get(server.url)
        until(lambda: "fc6 waits 41 ms" in text_of(driver, "verdict"))
        assert server.token not in driver.current_url
        assert driver.title == f"train.py {EVIL} - Poseidon"
        for shown in ("speed", "loss", "memory", "timeline"):
            assert driver.execute_script("return document.querySelector(`#${arguments[0]} svg`) !== null", shown)
        assert text_of(driver, "links").count("312 Mbit/s") == 6
        assert EVIL in text_of(driver, "plan")
        assert f"sharded3 GB5 MB{EVIL}1 GB1 MB" in text_of(driver, "routes")
        assert "9, 2.7 MB" in text_of(driver, "workers")
        assert EVIL in text_of(driver, "events")
        until(lambda: EVIL in text_of(driver, "log"))
        # Neither a script nor an image came from what the job said.
        assert driver.execute_script("return document.querySelectorAll('script, img').length") == 1
        assert driver.get_log("browser") == []
        driver.execute_script(
            "const w = document.getElementById('which'); w.value = '2'; w.dispatchEvent(new Event('change'))"
        )
        until(lambda: "last words of worker 2" in text_of(driver, "log"))
        state = json.loads((folder / STATE).read_text())
        state["verdict"] = {**state["verdict"], "text": "limited by computation", "is_sure": False}
        (folder / STATE).write_text(json.dumps(state))
        until(lambda: text_of(driver, "verdict").startswith("probably limited by computation"))
        (folder / SUMMARY).write_text('{"status": 75, "cause": "node2 was lost", "steps_per_s": 3, "samples_per_s": 4}')
        until(lambda: text_of(driver, "badge") == "ended with status 75")
        assert text_of(driver, "verdict").startswith("node2 was lost")
    finally:
        server.close()


def test_the_page_fits_a_phone_and_a_keyboard(driver: Any, tmp_path: Path) -> None:
    server = PageServer(make_run(tmp_path / "run"))
    try:
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride", {"width": 390, "height": 800, "deviceScaleFactor": 1, "mobile": True}
        )
        driver.get(server.url)
        until(lambda: "fc6" in text_of(driver, "verdict"))
        assert driver.execute_script("return document.documentElement.scrollWidth <= window.innerWidth")
        # Whatever scrolls can be reached by the Tab key, and says what it is.
        boxes = driver.execute_script(
            "return [...document.querySelectorAll('.scroll, pre, .events')].map(one => [one.tabIndex, "
            "one.getAttribute('aria-label') || one.parentElement.getAttribute('aria-labelledby')])"
        )
        assert all(index == 0 and label for index, label in boxes)
        assert driver.execute_script(
            "return [...document.querySelectorAll('svg[role=img]')].every(one => one.getAttribute('aria-label'))"
        )
    finally:
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        server.close()


def test_a_running_job_is_judged_recorded_and_served(tmp_path: Path) -> None:
    program, end = tmp_path / "train.py", tmp_path / "end"
    program.write_text(PROGRAM)
    end.write_text("1000000")
    run = tmp_path / "run"
    command = [sys.executable, "-m", "poseidon", "run", "--nproc", "2", "--page", "--trace", "3:5", "--log-dir", run]
    said = tmp_path / "said"
    with said.open("wb") as err:
        job = subprocess.Popen([*map(str, command), str(program), str(end)], stderr=err, stdout=err, cwd=tmp_path)
    try:
        url = until(lambda: re.search(r"http://\S+", said.read_text()))[0]
        until(lambda: read_json(run / STATE).get("verdict", {}).get("cause") == "input", 90)
        address, token = url.split("/?token=")
        asked = urllib.request.Request(f"{address}/metrics", headers={"Authorization": f"Bearer {token}"})
        with urllib.request.urlopen(asked, timeout=20) as answer:
            assert "poseidon_samples_per_second" in answer.read().decode()
        state = read_json(run / STATE)
        assert (state["verdict"]["rank"], len(state["workers"])) == (1, 2)
        assert "train.py:" in state["verdict"]["text"]
        assert state["plan"]["items"]
        # Far enough ahead for all workers to read it before they are there.
        (tmp_path / "new").write_text(str(max(worker["step"] for worker in state["workers"]) + 40))
        (tmp_path / "new").replace(end)
        assert job.wait(60) == 0
    finally:
        job.kill()
        job.wait()
    summary = read_json(run / SUMMARY)
    assert summary["status"] == 0
    assert summary["steps"] > 10
    assert summary["waited_s"][0] > summary["waited_s"][1]
    assert token not in (run / "launcher.log").read_text()
    kinds = [event["event"] for event in read_events(run)]
    assert kinds[0] == "start"
    assert kinds[-1] == "end"
    assert "plan" in kinds
    assert (run / EVENTS).stat().st_size < 100_000
    trace = json.loads((run / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in trace if event["ph"] == "X"} == {1, 2}
    assert {"in forward", "in backward"} <= {event["name"] for event in trace}
