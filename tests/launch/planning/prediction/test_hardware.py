"""The catalogue of hardware: complete, sourced, and extended by a user's file."""

import pytest
import yaml
from launching import ROOT

from launch.planning.prediction import hardware
from launch.planning.prediction.software import SYSTEMS
from recipes import catalog
from recipes.problems import ProblemsError

DOCUMENT = yaml.safe_load((ROOT / hardware.SHOWN).read_text())


def figures(value, path=()):
    """Every number of the file with where it stands, and its source where it has one."""
    if isinstance(value, dict) and "is" in value:
        yield path, value.get("source")
    elif isinstance(value, dict):
        for key, below in value.items():
            yield from figures(below, (*path, key))
    elif isinstance(value, (int, float)) and path[-1] not in ("gpus", "pcie"):
        yield path, None


def test_every_node_can_be_read():
    for name in hardware.names():
        node = hardware.find(name)
        assert node.gpus >= 1 and node.gpu.memory_bytes > 1e10 and "fp32" in node.gpu.tflops, name


def test_every_figure_names_a_source_that_the_file_has():
    found = [figure for part in ("gpus", "nodes", "made_up") for figure in figures(DOCUMENT[part])]
    assert len(found) > 150
    for path, source in found:
        assert source in DOCUMENT["sources"], path
    assert set(DOCUMENT["sources"]) == {source for _, source in found}, "a source that nothing uses"


def test_recipes_name_nodes_and_systems_that_there_are():
    named = 0
    for name in catalog.titles():
        recipe = catalog.load(name)
        if recipe.hardware and recipe.hardware.node:
            node = hardware.find(recipe.hardware.node)
            named += 1
            assert recipe.hardware.gpus_per_node in (None, node.gpus), name
            assert recipe.hardware.gpu_memory_gb == pytest.approx(node.gpu.memory_gib, abs=1), name
        if recipe.published and recipe.published.software:
            assert recipe.published.software in SYSTEMS, name
    assert named == 115


# The example of the documents, as it is written there.
OWN = (
    (ROOT / "docs" / "planning.md").read_text(encoding="utf-8").partition("```yaml\n")[2].partition("```")[0]
)


def test_a_users_file_adds_nodes_and_may_use_the_catalogues_gpus(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace("gb_s: 8}", "gb_s: {is: 8, source: measured}}"))
    node = hardware.find(f"{path}:box")
    assert (node.gpu.title, node.link.gb_s, node.network.gb_s) == ("My GPU", 8, 12.5)
    path.write_text(OWN.replace("gpu: mine", "gpu: a100-40"))
    assert hardware.find(f"{path}:box").gpu.title == hardware.find("a100-40x8").gpu.title


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("gpus: 2", "gpus: 0"), "box: gpus: Input should be greater than 0"),
        (("pcie_gb_s: 8", "pcie_gbs: 8"), "box: pcie_gbs: Extra inputs"),
        (("gpu: mine", "gpu: mime"), "no such GPU of .*did you mean mine"),
        (("  box:", "  bex:"), "box: no such node of .*did you mean bex"),
        (("gpus:\n", "cards:\n"), "cards: Extra inputs"),
        ((OWN, "[1, 2"), "is no YAML|not valid YAML|YAML"),
        ((OWN, "a: 1"), "mine.yaml: a: Extra inputs are not permitted"),
    ],
)
def test_what_is_wrong_with_a_users_file_is_said(tmp_path, change, says):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN.replace(*change))
    with pytest.raises(ProblemsError, match=says):
        hardware.find(f"{path}:box")


def test_an_unknown_node_is_answered_with_near_ones():
    with pytest.raises(ProblemsError, match="no such node or GPU; did you mean v100-32x8"):
        hardware.find("v100-32-8")


def test_a_file_without_a_node_is_told_the_form(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(OWN)
    with pytest.raises(ProblemsError, match="no node is named.*mine.yaml:box"):
        hardware.find(str(path))


@pytest.mark.parametrize(
    ("typed", "node", "gpus", "link"),
    [
        ("4xv100-32", "v100-32x4", 4, "NVLink"),
        ("v100-32x4", "v100-32x4", 4, "NVLink"),
        ("16xV100-32GB", "dgx2", 16, "NVSwitch"),
        ("8xa100-80", "a100-80x8", 8, "NVSwitch"),
        ("2080ti", "2080ti", 1, "PCIe 3.0"),
        ("h100", "1xh100-80", 1, "NVSwitch"),
        ("2xh200", "2xh200", 2, "NVSwitch"),
        ("b200", "1xb200", 1, "NVSwitch"),
        ("8xmi300x", "mi300x8", 8, "Infinity Fabric"),
        ("rtx-4090", "1xrtx-4090", 1, "PCIe 4.0"),
        ("NVIDIA GeForce RTX 4090", "1xrtx-4090", 1, "PCIe 4.0"),
        ("2x3090", "2xrtx-3090", 2, "PCIe 4.0"),
        ("rtx3090x2", "2xrtx-3090", 2, "PCIe 4.0"),
        ("l40s", "1xl40s", 1, "PCIe 4.0"),
        ("4xa100-sxm4-40gb", "a100-40x4", 4, "NVLink"),
        ("v100-pcie", "1xv100-32-pcie", 1, "PCIe 3.0"),
        ("8 H100", "h100-80x8", 8, "NVSwitch"),
        ("4 x V100-32GB", "v100-32x4", 4, "NVLink"),
        ("V100 32GB x4", "v100-32x4", 4, "NVLink"),
        ("2 3090", "2xrtx-3090", 2, "PCIe 4.0"),
        ("RTX 5090", "1xrtx-5090", 1, "PCIe 5.0"),
        ("RTX 4060 laptop", "1xrtx-4060-laptop", 1, "PCIe 4.0"),
        ("4060 laptop", "1xrtx-4060-laptop", 1, "PCIe 4.0"),
    ],
)
def test_hardware_by_the_names_that_people_type(typed, node, gpus, link):
    found = hardware.find(typed)
    assert (found.name, found.gpus, found.link.kind) == (node, gpus, link)


def test_every_gpu_is_reached_by_its_name_in_machines_of_one_to_eight():
    for key in DOCUMENT["gpus"]:
        for count in range(1, 9):
            node = hardware.find(f"{count}x{key}")
            assert (node.gpu.name, node.gpus) == (key, count)
            assert node.host.cores >= 1


def test_a_part_of_a_node_and_a_made_up_one_have_their_share_of_a_host():
    whole = hardware.find("h100-80x8")
    part = hardware.find("2xh100")
    assert part.host.memory_gb == whole.host.memory_gb / 4
    assert part.host.cores == whole.host.cores // 4
    one, four = hardware.find("1xl40s").host, hardware.find("4xl40s").host
    figures = ("memory_gb", "memory_gb_s", "cores")
    assert [getattr(four, name) for name in figures] == [4 * getattr(one, name) for name in figures]
    assert (part.link, part.pcie_gb_s, part.network) == (whole.link, whole.pcie_gb_s, None)


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("v100", r"may be v100-16, v100-32 or v100-32-pcie; --hardware 4xv100-16, or a node: dgx2, hpe1270"),
        ("4xa100", r"may be a100-40 or a100-80; --hardware 4xa100-40"),
        ("16xh100", "1 to 8 GPUs; --hardware 8xh100-80 --nodes 2"),
        ("0x3090", "1 to 8 GPUs; --hardware 8xrtx-3090 --nodes 1"),
        ("4xh1000", "no such node or GPU; did you mean h100-80"),
        ("4 V100", r"may be v100-16, v100-32 or v100-32-pcie; --hardware 4xv100-16"),
        ("M3 Max", r"a Mac trains nothing here, which needs Linux; .*FILE.yaml:NODE of your own"),
        ("mps", "a Mac trains nothing here"),
        ("TPU v4", "DeepSpeed does not train on TPUs"),
        ("2 Gaudi3", "nothing was tried on Intel's accelerators"),
        ("cpu", "pretrain.py --plan is for this machine"),
        ("RTX 4090 Laptop GPU", "a laptop's GPU is slower than the card of its name"),
        ("rtx-4060", "no such node or GPU; did you mean rtx-4090"),
        ("A6000", "no such node or GPU; .*FILE.yaml:NODE of your own: docs/planning.md"),
        ("x", "no such node or GPU"),
        ("8x", "no such node or GPU"),
        ("rtx", "no such node or GPU"),
    ],
)
def test_a_name_that_is_no_gpu_or_several_is_refused_with_what_it_could_be(typed, says):
    with pytest.raises(ProblemsError, match=says):
        hardware.find(typed)
