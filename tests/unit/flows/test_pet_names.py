"""The pet names' parts: what a list is, what is learnt from it, and what counts as a new
name."""

import json
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch

from flows import pet_names
from flows.pet_names import END, NO_LETTER, NameNet, Options, letters, make_up, names_in
from prefect_torch_ddp import InvalidParamsError, RankContext


def test_a_list_has_each_name_once_as_it_is_first_written() -> None:
    """Whatever its line ends, spaces, accents' form and case."""
    content = "\ufeffBello\r\n\r\n  Rex  II \nBELLO\nZoe\u0308\nZoë\n".encode()
    found = names_in(content, "names.txt")
    assert found.names == ["Bello", "Rex II", "Zoë"]
    assert found.dropped == ["", "BELLO", "Zoë"], "what is dropped is named"
    in_json = json.dumps(["Bello", "Rex  II", "BELLO", ""]).encode()
    assert names_in(in_json, "names.json") == (["Bello", "Rex II"], ["BELLO", ""])


@pytest.mark.parametrize(
    ("content", "file", "says"),
    [
        (b"\xff\xfe", "names.txt", "names.txt is no UTF-8 text .* save it as UTF-8"),
        (b"Bello\n\nBELLO", "names.txt", "names.txt has 1 names; give at least 2"),
        (b"Bello", "names.json", r"names.json is no JSON .*; give a list of names, \["),
        (b'{"a": 1}', "names.json", "names.json is no list of texts; give a list"),
        (b'["a", 1]', "names.json", "names.json is no list of texts; give a list"),
        (
            b"Bello\n" + b"Rex, " * 40,
            "names.txt",
            "names.txt has a line of 199 characters, 'Rex, .* on each line",
        ),
    ],
)
def test_what_is_no_list_is_refused(content: bytes, file: str, says: str) -> None:
    """With the way out."""
    with pytest.raises(InvalidParamsError, match=says):
        names_in(content, file)


@pytest.mark.parametrize("place", ["source", "path", "address"])
def test_a_list_is_found_by_its_place(tmp_path: Path, place: str) -> None:
    """In the run's source, by a path, and at an address."""
    (tmp_path / "dogs.json").write_text('["Bello", "Rex", "bello", "Zoe"]')
    handler = partial(SimpleHTTPRequestHandler, directory=tmp_path)
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        files = {
            "source": "dogs.json",
            "path": str(tmp_path / "dogs.json"),
            "address": f"http://127.0.0.1:{server.server_port}/dogs.json?v=1",
        }
        source = {"source": tmp_path} if place == "source" else {}
        options = {"file": files[place]}
        with RankContext.local(data=tmp_path, options=options, stage="prepare", **source) as ctx:
            pet_names.prepare(ctx)
        with (
            RankContext.local(
                data=tmp_path,
                options={"file": files["address"].replace("?", ".gz?")},
                stage="prepare",
            ) as ctx,
            pytest.raises(InvalidParamsError, match=r"dogs.json.gz\?v=1 can't be read: .*404"),
        ):
            pet_names.prepare(ctx)
        server.shutdown()
        thread.join()
    found = json.loads((tmp_path / "names.json").read_text())
    assert sorted(found["train"] + found["test"]) == ["Bello", "Rex", "Zoe"]
    assert found["dropped"] == ["bello"]


def test_a_net_of_four_layers_is_an_option() -> None:
    """Its state has four layers; a single one drops nothing between layers."""
    assert "lstm.weight_hh_l3" in pet_names.make_net(Options(layers=4), 3).state_dict()
    assert pet_names.make_net(Options(layers=1), 3).lstm.dropout == 0


def test_each_letter_is_to_be_foreseen_from_those_before() -> None:
    """Padding after the end of a name doesn't count."""
    given, wanted = letters(["ab", "b"], ["a", "b"]).tensors
    assert given.tolist() == [[END, 1, 2], [END, 2, END]]
    assert wanted.tolist() == [[1, 2, END], [2, END, NO_LETTER]]


def test_new_names_are_seeded_and_on_no_list() -> None:
    """In any case, each once; fewer if there are no more."""
    torch.manual_seed(0)
    net, options = NameNet(2, hidden=4).eval(), Options(num_new=20)
    known = ["A", "aB", "BA"]
    with torch.no_grad():
        new = make_up(net, ["a", "B"], known, options, seed=1)
        assert new == make_up(net, ["a", "B"], known, options, seed=1)
        assert new != make_up(net, ["a", "B"], known, options, seed=2)
        folded = [name.casefold() for name in new]
        assert len(set(folded)) == len(new) == 20
        assert not {"a", "ab", "ba"} & set(folded)
        net.head.bias[END] = 50.0  # now each name ends before its first letter
        assert make_up(net, ["a", "B"], known, options, seed=1) == []


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"epoch": 3}, r"no option epoch; did you mean epochs\?; there are file, held_out,"),
        ({"held_out": 1.5}, "held_out is 1.5; it should be less than 1"),
        ({"file": "dogs.txt"}, "has no dogs.txt; name the list by data_options={'file': ...}"),
    ],
)
def test_bad_options_are_named(tmp_path: Path, options: dict[str, Any], says: str) -> None:
    """When the data is prepared."""
    with (
        RankContext.local(data=tmp_path, source=tmp_path, options=options, stage="prepare") as ctx,
        pytest.raises(InvalidParamsError, match=says),
    ):
        pet_names.prepare(ctx)
