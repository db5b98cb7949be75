"""The page's server: who may see it, what it answers, and that a job's words stay words."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from made_runs import make_run
from poseidon.cli import completion, status
from poseidon.cli.main import COMMANDS, main
from poseidon.errors import ConfigError
from poseidon.observe.folder import EVENTS, MOST_EVENTS, STATE, SUMMARY, RunFolder, find_run, read_events, tail_lines
from poseidon.observe.metrics import format_metrics
from poseidon.observe.page.server import PageServer, snapshot


@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    made = PageServer(make_run(tmp_path / "run"))
    yield made
    made.close()


def ask(server: PageServer, path: str, **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, dict(answer.getheaders()), body


@pytest.mark.parametrize(
    "path", ["/", "/state", "/stream", "/metrics", "/log?of=0", "/page.js", "/trace.json", "/?token=x"]
)
def test_nothing_is_shown_without_the_token(server: PageServer, path: str) -> None:
    assert ask(server, path)[0] == 403
    assert ask(server, path, Cookie=f"{server.cookie}=wrong", Authorization="Bearer wrong")[0] == 403


def test_the_token_in_the_address_becomes_a_cookie(server: PageServer) -> None:
    status_, headers, _ = ask(server, f"/?token={server.token}")
    assert (status_, headers["Location"]) == (303, "/")
    assert "HttpOnly; SameSite=Strict" in headers["Set-Cookie"]
    status_, headers, body = ask(server, "/", Cookie=headers["Set-Cookie"].partition(";")[0])
    assert status_ == 200
    assert b"<title>" in body
    assert "script-src 'self'" in headers["Content-Security-Policy"]
    assert "unsafe" not in headers["Content-Security-Policy"]


def test_the_pages_of_two_jobs_do_not_turn_each_other_out(server: PageServer, tmp_path: Path) -> None:
    other = PageServer(make_run(tmp_path / "other"))
    try:
        jar = {}
        for one in (server, other):  # a browser keeps cookies by host, whatever the port
            name, _, value = ask(one, f"/?token={one.token}")[1]["Set-Cookie"].partition(";")[0].partition("=")
            jar[name] = value
        cookies = "; ".join(f"{name}={value}" for name, value in jar.items())
        assert [ask(one, "/", Cookie=cookies)[0] for one in (server, other)] == [200, 200]
    finally:
        other.close()


@pytest.mark.parametrize(
    ("host", "port", "match"),
    [
        ("127.0.0.1", 65536, "the page's port is 65536, expected a port from 1 to 65535, or 0"),
        ("127.0.0.1", -1, "the page's port is -1"),
        ("a..b", 0, "the page cannot be served at a..b port 0: .*another address"),
    ],
)
def test_an_address_that_cannot_be_is_refused(host: str, port: int, match: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=match):
        PageServer(make_run(tmp_path / "run"), host, port)


def test_who_watches_sees_the_end_before_the_page_closes(server: PageServer) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.request("GET", "/stream", headers={"Authorization": f"Bearer {server.token}"})
    answer = connection.getresponse()
    assert b'"summary": {}' in answer.readline()
    (server.folder / SUMMARY).write_text('{"status": 7}')
    server.close()
    assert b'"summary": {"status": 7}' in answer.read()
    connection.close()


@pytest.mark.parametrize("which", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "-1", "9" * 400, "0/../0", "²"])
def test_no_address_leads_out_of_the_folder(server: PageServer, which: str) -> None:
    status_, _, body = ask(server, f"/log?of={which.replace('²', '%C2%B2')}", Authorization=f"Bearer {server.token}")
    assert (status_, body) == (200, b"")
    assert ask(server, "/../server.py", Authorization=f"Bearer {server.token}")[0] == 404


def test_logs_are_plain_text(server: PageServer) -> None:
    _, headers, body = ask(server, "/log?of=0", Authorization=f"Bearer {server.token}")
    assert headers["Content-Type"].startswith("text/plain")
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"<script>" in body


def test_our_own_page_needs_nothing_from_elsewhere_and_has_no_markup_from_the_job() -> None:
    folder = Path(COMMANDS and __import__("poseidon.observe.page", fromlist=["x"]).__file__).parent
    for name in ("page.html", "page.css", "page.js"):
        text = (folder / name).read_text().replace("http://www.w3.org/2000/svg", "")
        assert "http" not in text.replace("https://ui.perfetto.dev", "")
        for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "onclick=", "style="):
            assert way not in text, f"{way} in {name}"


def test_metrics_are_in_prometheus_format(server: PageServer) -> None:
    text = ask(server, "/metrics", Authorization=f"Bearer {server.token}")[2].decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert float(values["poseidon_steps_per_second"]) == 9.5
    assert float(values['poseidon_step_seconds{worker="2",host="node2",part="wait"}']) > 0
    assert 'poseidon_limited{cause="link",host="node3"}' in values
    assert float(values['poseidon_route_bytes_total{route="sharded"}']) == 3e9
    assert float(values['poseidon_queued_messages{worker="2",host="node2"}']) == 6
    kinds = [line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(kinds) == len(set(kinds))


def test_labels_of_metrics_are_escaped() -> None:
    state = {"workers": [{"rank": 0, "host": 'a"b\\c\nd', "step": 3}]}
    assert 'poseidon_step{worker="0",host="a\\"b\\\\c\\nd"} 3' in format_metrics(state, {})
    assert format_metrics({}, {}).startswith("# HELP poseidon_up")


def test_a_state_that_stays_old_is_said_to_be_old(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert not snapshot(folder)["is_stale"]
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps({**state, "updated_at": time.time() - 60}))
    assert snapshot(folder)["is_stale"]
    (folder / SUMMARY).write_text('{"status": 0}')
    assert not snapshot(folder)["is_stale"]


def test_damaged_files_are_nothing(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / STATE).write_bytes(b"\xff{")
    (folder / EVENTS).write_bytes(b'{"event": 3}\nrubbish\n[1]\n\xff\n')
    assert snapshot(folder)["state"] == {}
    assert read_events(folder) == [{"event": 3}]


def test_events_are_bounded_but_the_end_is_kept(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.open()
    for number in range(MOST_EVENTS + 100):
        folder.event("verdict", number=number)
    folder.event("end", is_last=True)
    folder.close()
    lines = (tmp_path / "run" / EVENTS).read_text().splitlines()
    assert len(lines) == MOST_EVENTS + 1
    assert json.loads(lines[-1])["event"] == "end"


def test_the_tail_of_a_long_file_begins_with_a_whole_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(1000)))
    assert tail_lines(path, 3) == ["line 997", "line 998", "line 999"]
    assert tail_lines(path, 500, most_bytes=100)[0].startswith("line ")
    assert tail_lines(tmp_path / "none", 3) == []


def test_status_says_how_a_run_is_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match="no run below"):
        find_run(None)
    folder = make_run(tmp_path / "runs" / "train-1")
    assert main(["status"]) == 0
    assert "limited by the wire: fc6 waits 41 ms a step on node3's link" in capsys.readouterr().out
    assert main(["status", "train-1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_running"] is True
    state = json.loads((folder / STATE).read_text())
    (folder / STATE).write_text(json.dumps({**state, "updated_at": time.time() - 60}))
    assert main(["status"]) == status.LOST_STATUS
    assert main(["status", "nowhere"]) == 1


def test_completion_knows_commands_and_their_options() -> None:
    options = completion.options_of_commands(["run", "status"])
    assert {"--page", "--trace", "--nproc"} <= set(options["run"])
    assert "--json" in options["status"]
    for shell in completion.SHELLS:
        lines = completion.write_completion(shell, options)
        assert "status" in lines
        assert "trace" in lines
