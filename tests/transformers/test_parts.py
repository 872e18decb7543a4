"""How layers are divided into chunks, and what a hit needs of them."""

from tiercache.integrations.transformers.parts import LayerKv, Part, needed, parts_of

FULL = LayerKv(2, 16, 16)
WINDOW = LayerKv(2, 16, 16, window_tokens=24)


def test_layers_with_a_window_lie_in_chunks_of_their_own_that_are_no_larger() -> None:
    layers = [WINDOW, WINDOW, FULL, WINDOW, WINDOW, FULL]
    assert parts_of(layers, 2) == [Part((2, 5), 256, 0), Part((0, 1), 256, 24), Part((3, 4), 256, 24)]


def test_a_layer_that_is_larger_than_others_together_lies_alone() -> None:
    large = LayerKv(8, 64, 32, window_tokens=24)
    assert [part.layers for part in parts_of([FULL, large, large], 2)] == [(0,), (1,), (2,)]


def test_of_a_window_only_the_chunks_are_needed_that_the_next_token_sees() -> None:
    part = Part((0,), 128, window_tokens=24)
    assert [part.first_chunk(chunks, 16) for chunks in (1, 2, 3, 10)] == [0, 0, 1, 8]
    assert Part((0,), 128, window_tokens=17).first_chunk(3, 16) == 2, "16 tokens before it: one whole chunk"
    assert Part((0,), 128, window_tokens=18).first_chunk(3, 16) == 1
    assert Part((0,), 128, window_tokens=1).first_chunk(3, 16) == 3, "it sees nobody but itself"


def test_what_is_needed_comes_in_the_order_of_the_tokens() -> None:
    parts = [Part((0,), 128, 0), Part((1,), 128, window_tokens=17)]
    assert needed(parts, 3, 16) == [(0, 0), (1, 0), (2, 0), (2, 1)]
