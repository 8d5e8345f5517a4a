"""Which mask goes to which site: whole components, longest key, cross-attention when named."""

from dataclasses import dataclass

import pytest

from stof_compile import masks
from stof_compile.attention.resolve import path_matches, resolve_masks
from stof_compile.errors import StofMaskError


@dataclass(frozen=True)
class Site:
    name: str
    cross: bool = False

    @property
    def path(self) -> tuple[str, ...]:
        return tuple(self.name.split("."))


SITES = [
    Site("encoder.layer.1.attention"),
    Site("encoder.layer.10.attention"),
    Site("decoder.block.0.layer.0.SelfAttention"),
    Site("decoder.block.0.layer.1.EncDecAttention", cross=True),
]
WINDOW = masks.sliding_window(4)
CAUSAL = masks.causal()


def resolve(mask, **kwargs):
    return resolve_masks(mask, SITES, **{"path_known": True, "whole_model": True, **kwargs})


@pytest.mark.parametrize(
    ("key", "path", "expected"),
    [
        ("encoder.layer.1", "encoder.layer.1.attention", True),
        ("encoder.layer.1", "encoder.layer.10.attention", False),
        ("encoder.layer.1*", "encoder.layer.10.attention", True),
        ("encoder.*.1", "encoder.layer.1.attention", True),
        ("*", "encoder.layer.1.attention", True),
        ("layer.1", "encoder.layer.1.attention", False),
        ("encoder.layer.1.attention.self", "encoder.layer.1.attention", False),
    ],
)
def test_path_components(key, path, expected):
    assert path_matches(key, tuple(path.split("."))) is expected


def test_one_mask_goes_to_every_self_attention():
    found = resolve(WINDOW).by_site
    assert set(found) == {s.name for s in SITES if not s.cross}


def test_longest_key_wins():
    found = resolve({"encoder.*": WINDOW, "encoder.layer.1": CAUSAL}).by_site
    assert found["encoder.layer.1.attention"] == CAUSAL
    assert found["encoder.layer.10.attention"] == WINDOW


def test_cross_attention_only_when_named():
    assert "decoder.block.0.layer.1.EncDecAttention" not in resolve({"decoder.*": WINDOW}).by_site
    named = resolve({"decoder.block.*.layer.1": WINDOW}).by_site
    assert set(named) == {"decoder.block.0.layer.1.EncDecAttention"}


def test_unmatched_path_is_an_error_in_a_one_graph_model():
    with pytest.raises(StofMaskError, match=r"'encoder.layr.1'.*did you mean 'encoder.layer.1'"):
        resolve({"encoder.layr.1": WINDOW})


def test_unmatched_path_is_listed_when_there_are_more_graphs():
    assert resolve({"pooler": WINDOW, "encoder.layer.1": WINDOW}, whole_model=False).unmatched == (
        "pooler",
    )


def test_paths_in_a_submodule_graph_are_an_error():
    with pytest.raises(StofMaskError, match="starts inside a submodule"):
        resolve({"encoder.layer.1": WINDOW}, path_known=False)


def test_no_mask():
    assert resolve(None).by_site == {}
