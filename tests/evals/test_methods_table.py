"""docs/methods.md says what the code does now."""

from __future__ import annotations

from dllm.evals import methods_table


def test_the_file_is_what_the_code_writes_and_what_is_exact_was_found_exact():
    text = methods_table.build()
    assert methods_table.PATH.read_text(encoding="utf-8") == text, "run python -m dllm.evals.methods_table"
    rows = {line.split(" | ")[0].strip("| "): line for line in text.splitlines() if line.startswith("| ")}
    for name in ("guide, on_reject ar, exact", "FreeDave, exact", "SimSD, exact"):
        assert "same text" in rows[name]
        assert "other text" not in rows[name]
