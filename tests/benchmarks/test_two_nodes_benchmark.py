"""Predictions for two nodes; tests/distributed/test_two_nodes.py has the nodes themselves."""

from benchmarks.ranks.two_nodes_times import CASE, MESHES, format_two_nodes, predict_seconds
from moe.network.topology_file import parse_network


def network(bandwidth):
    level = {"bandwidth": "1 GB/s", "latency": "100 us"}
    levels = {"inside": level, "across": {**level, "bandwidth": bandwidth}}
    nodes = {"nodes": 2, "per_node": 2, "shared_card": True}
    return parse_network({"name": "two", "two_level": {**nodes, **levels}})


def test_a_slower_link_costs_every_mesh_about_as_much_more():
    for name, mesh in MESHES.items():
        fast = predict_seconds(CASE, mesh, network("0.1 GB/s"))
        slow = predict_seconds(CASE, mesh, network("0.01 GB/s"))
        assert 4 < slow / fast < 10, name


def test_the_table_names_the_link():
    row = {"mesh": "ep 4", "ms": 5.0, "exchange_ms": 4.0, "predicted_ms": 2.0, "ratio": 0.5}
    text = format_two_nodes({"bandwidth": 25.0, "latency": 2.0, "apart_ms": 1.0, "rows": [row]})
    assert "25 MB/s and 2 ms" in text
    assert "ep 4" in text and "0.50" in text
