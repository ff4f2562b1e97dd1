"""Renders the chart with Helm's own library, in a process of its own because that brings the runtime of Go.

    python -m tests.contracts.helm CHART < VALUES.json

Reads a list of values, and prints for each ``{"files": {name: text}}`` or ``{"error": text}``.
"""

import json
import sys
from typing import Any

import helm_python


def main(chart_folder: str) -> None:
    """Render once for each values; with the findings of ``helm lint`` for the first."""
    values = json.load(sys.stdin)
    with helm_python.Chart.load(chart_folder) as chart:
        rendered = [render(chart, item) for item in values]
    findings = helm_python.lint(chart_folder, values[0], strict=True, kube_version="v1.34.0")["messages"]
    print(json.dumps({"rendered": rendered, "findings": findings}))  # noqa: T201 - this is the result


def render(chart: helm_python.Chart, values: dict[str, Any]) -> dict[str, Any]:
    try:
        chart.validate_schema(values)
        return {"files": chart.render(values, name="warmpath", namespace="inference")}
    except helm_python.HelmError as error:
        return {"error": str(error)}


if __name__ == "__main__":
    main(sys.argv[1])
