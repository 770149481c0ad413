"""A server on a Ray cluster of two nodes: a node is killed under load, and nothing is lost."""

from __future__ import annotations

import signal
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.faults.test_replacement import Trigger, all_streamed, check_same, streamed
from tests.faults.test_replicas import check_books
from tests.support.server_process import END_S, ROOT, ServerProcess, all_gone

NODE = {"num_cpus": 1, "object_store_memory": 80 << 20, "include_dashboard": False}
WORDS = "--dtype float32 --port 0 --max-total-tokens 8192".split()


def words_in_docs(module: str) -> list[str]:
    """The options of the example on the page about scaling."""
    start = f"python -m {module} "
    lines = (ROOT / "docs/scaling.md").read_text("utf-8").splitlines()
    (line,) = [line for line in lines if line.startswith(start) and ("--use-ray" in line or "ray" in module)]
    return line.removeprefix(start).split()


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Make a cluster of two nodes, each with room for one replica."""
    cluster = Cluster(initialize_head=True, head_node_args=NODE)
    cluster.add_node(**NODE)
    cluster.wait_for_nodes()
    yield cluster
    cluster.shutdown()


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """Make a folder with a short name, because the names of sockets within are limited."""
    with tempfile.TemporaryDirectory(prefix="srt-") as folder:
        yield Path(folder)


def processes_of(node: object) -> list[psutil.Process]:
    """Everything that a node of the cluster runs."""
    (raylet,) = node.all_processes["raylet"]  # type: ignore[attr-defined]
    parent = psutil.Process(raylet.process.pid)
    return [parent, *parent.children(recursive=True)]


def servers_of(cluster: Cluster) -> list[psutil.Process]:
    """The processes of servers that Ray has started."""
    processes = [process for node in cluster.list_all_nodes() for process in processes_of(node)]
    return [process for process in processes if process.cmdline()[-1:] and "srt." in process.cmdline()[-1]]


def kill(processes: list[psutil.Process]) -> None:
    """Kill these processes as the loss of a machine would: all of them, and none has a say."""
    for process in processes:
        process.suspend()
    for process in processes:
        process.kill()


def test_a_node_that_dies_under_load_loses_nothing(cluster: Cluster, tmp_path: Path) -> None:
    words = [*words_in_docs("srt.launch_server"), *WORDS, "--max-replacements", "1000"]
    with ServerProcess("srt.launch_server", words, tmp_path, {"RAY_ADDRESS": cluster.address}) as server:
        url = server.wait_ready()
        undisturbed = all_streamed(url)
        (lost,) = cluster.worker_nodes
        processes = processes_of(lost)
        assert any(process.cmdline()[-1] == "srt.managers.tp_worker" for process in processes)
        check_same(all_streamed(url, Trigger(200, lambda: kill(processes))), undisturbed)
        server.wait_for("is gone")
        assert all_gone(processes)
        assert httpx.get(f"{url}/ready", timeout=END_S).status_code == 200

        cluster.remove_node(lost, allow_graceful=False)
        cluster.add_node(**NODE)
        server.wait_for("at work again")
        check_books(url)
        check_same(all_streamed(url), undisturbed)

        left = servers_of(cluster)
        assert len(left) == 6, "a supervisor, a scheduler and a worker on each node"
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.lines
        assert all_gone(left) and not server.left_behind()


def test_hosts_end_with_the_server_that_asked_for_them(cluster: Cluster, tmp_path: Path) -> None:
    words = [*words_in_docs("srt.launch_server"), *WORDS]
    with ServerProcess("srt.launch_server", words, tmp_path, {"RAY_ADDRESS": cluster.address}) as server:
        server.wait_for("Host 1 has joined")
        left = [*servers_of(cluster), *server.children()]
        assert any(process.cmdline()[-1] == "srt.launch_server" for process in left)
        server.popen.kill()
        assert all_gone(left)


def test_ray_serve_answers_with_the_same_tokens(cluster: Cluster, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [*words_in_docs("srt.ray_serve"), *WORDS, "--port", str(port)]
    body = {
        "text": "Once upon a time",
        "sampling_params": {"max_new_tokens": 40, "temperature": 0.8, "sampling_seed": 3},
    }
    with ServerProcess("srt.ray_serve", words, tmp_path, {"RAY_ADDRESS": cluster.address}) as server:
        url = server.wait_ready()
        whole = httpx.post(f"{url}/generate", json=body, timeout=END_S).json()
        assert whole["meta_info"]["completion_tokens"] == 40
        assert streamed(url, body)[0]["output_ids"] == whole["output_ids"]
        assert httpx.post(f"{url}/generate", json={"text": 5}, timeout=END_S).status_code == 400
        server.send(signal.SIGTERM)
        assert server.wait() == 0, server.lines
