"""Turns before rendering: merging, sorting of tool results, dropping of old reasoning.

Source: chat protocol, "Preprocessing, in order".
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from v41jax.protocol.turns import ToolResult, Turn


def merge(turns: Sequence[Turn]) -> list[Turn]:
    """Neighbouring user and tool messages become one user turn.

    A tool result joins any user turn in front of it; a user message does not join one that carries a task.
    """
    groups: list[list[Turn]] = []
    open_to_results = open_to_users = False
    for turn in turns:
        is_result = turn.role == "tool"
        if is_result:
            turn = Turn("user", blocks=(ToolResult(turn.call_id, turn.content),))
        if turn.role == "user" and (open_to_results if is_result else open_to_users):
            groups[-1].append(turn)
        else:
            groups.append([turn])
            open_to_users = turn.role == "user"
        open_to_results = turn.role == "user"
        open_to_users = open_to_users and turn.task is None
    return [group[0] if len(group) == 1 else _join(group) for group in groups]


def _join(turns: Sequence[Turn]) -> Turn:
    task = next((turn.task for turn in turns if turn.task is not None), None)
    return Turn("user", blocks=tuple(block for turn in turns for block in turn.blocks), task=task)


def sort_tool_results(turns: Sequence[Turn]) -> list[Turn]:
    """Orders the results of each user turn as the latest assistant's calls were; other blocks keep their places."""
    order: dict[str, int] = {}
    result = []
    for turn in turns:
        if turn.calls:
            order = {}
            for index, call in enumerate(turn.calls):
                if call.call_id is not None:
                    order.setdefault(call.call_id, index)
        found = [block for block in turn.blocks if isinstance(block, ToolResult)]
        if order and len(found) > 1:
            known = order
            ranked = iter(sorted(found, key=lambda block: known.get(block.call_id or "", 0)))
            blocks = tuple(next(ranked) if isinstance(block, ToolResult) else block for block in turn.blocks)
            turn = dataclasses.replace(turn, blocks=blocks)
        result.append(turn)
    return result


def last_user(turns: Sequence[Turn]) -> int:
    """Index of the last turn that asks something: a user's own words or a later system turn; -1 when none does.

    A turn of tool results alone continues the assistant's work, so it does not count.
    """
    for index in range(len(turns) - 1, -1, -1):
        turn = turns[index]
        if (turn.role == "user" and not turn.is_only_tool_results) or (turn.role == "system" and index > 0):
            return index
    return -1
