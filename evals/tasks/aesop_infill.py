"""Story infill on fables: windows of five sentences, the middle one is missing.

Dataset: "The Aesop for Children" (Rand McNally, 1919, public domain), cut into windows of five sentences that do not overlap, at most
    two a fable; rows of id, title, prefix, target, suffix. On no hub: ``--data``.
Split: the file as it is.
Prompt, Metric: as `story_infill`.
Source: ours, a free stand-in for ROCStories; there are no published numbers.
"""

from __future__ import annotations

from dllm.evals.tasks.story_infill import StoryInfill


class AesopInfill(StoryInfill):
    """`StoryInfill` on Aesop's fables."""

    name = "aesop_infill"
    where = "rows of id, prefix, target, suffix: five-sentence windows of The Aesop for Children (1919)"
