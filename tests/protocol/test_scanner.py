"""Markers in a stream: earliest, then longest; what may still become one is held."""

from __future__ import annotations

from v41jax.protocol.scanner import Markers, Scan


def test_the_earliest_marker_wins_then_the_longest():
    markers = Markers("<b>", "\n<b>", "<a>")
    assert markers.scan("x<a><b>") == Scan(1, "<a>")
    assert markers.scan("x\n<b>") == Scan(1, "\n<b>")
    assert markers.scan("x\n\n<b>") == Scan(2, "\n<b>")
    assert markers.scan("<a>x<b>", 3) == Scan(4, "<b>")


def test_the_longest_possible_beginning_is_held():
    markers = Markers("aab", "ab")
    assert markers.scan("xa") == Scan(1, None)
    assert markers.scan("xaa") == Scan(1, None)
    assert markers.scan("xaaa") == Scan(2, None)
    assert markers.scan("xac") == Scan(3, None)
    assert markers.scan("") == Scan(0, None)


def test_text_before_the_start_is_not_held_again():
    assert Markers("aab").scan("aa", 1) == Scan(1, None)
    assert Markers("aab").scan("xab", 2) == Scan(3, None)


def test_one_character_markers_hold_nothing():
    assert Markers(">").scan("abc") == Scan(3, None)
