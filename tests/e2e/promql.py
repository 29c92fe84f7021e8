# SPDX-License-Identifier: Apache-2.0
"""Which metrics and labels a PromQL expression names, and whether an exporter has them."""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from prometheus_client.parser import text_string_to_metric_families

TOKEN = re.compile(r'"[^"]*"|\[[^\]]*\]|[a-zA-Z_:][\w:]*|\d[\d.e+-]*|[=!]~|!=|\S')
NAME = re.compile(r"[a-zA-Z_:][\w:]*")
FUNCTIONS = {
    *("sum", "min", "max", "rate", "increase", "clamp_min", "histogram_quantile"),
    *("min_over_time", "present_over_time", "label_values"),
}
GROUPING = {"by", "without", "on", "ignoring", "group_left", "group_right"}
OPERATORS = {"and", "or", "unless", "bool", "offset"}
# What Prometheus adds to a target's samples, the last two on Kubernetes only, and says of it.
OF_TARGETS = {"job", "instance", "namespace", "pod"}
OF_PROMETHEUS = {"up"}


@dataclass
class Named:
    """What one expression names.

    Attributes:
        selectors: (metric, [(label, operator, value)]).
        labels: that it groups by.
    """

    selectors: list[tuple[str, list[tuple[str, str, str]]]] = field(default_factory=list)
    labels: set[str] = field(default_factory=set)


def names(expression: str) -> Named:
    """Read an expression.

    Raises:
        ValueError: a function that is not known here, or no metric at all.
    """
    found, tokens = Named(), TOKEN.findall(expression)
    at = 0
    while at < len(tokens):
        token, following = tokens[at], tokens[at + 1 : at + 2]
        at += 1
        if not NAME.fullmatch(token) or token in OPERATORS | FUNCTIONS:
            continue
        if token in GROUPING:
            end = tokens.index(")", at)
            found.labels |= set(tokens[at + 1 : end]) - {","}
            at = end + 1
        elif following == ["("]:
            raise ValueError(f"{token} is not a function known here: {expression}")
        else:
            matchers = []
            if following == ["{"]:
                end = tokens.index("}", at)
                parts = [part for part in tokens[at + 1 : end] if part != ","]
                matchers = [
                    (parts[i], parts[i + 1], parts[i + 2].strip('"'))
                    for i in range(0, len(parts), 3)
                ]
                at = end + 1
            found.selectors.append((token, matchers))
    if not found.selectors:
        raise ValueError(f"no metric in {expression}")
    return found


class Exported:
    """Samples in Prometheus' text format."""

    def __init__(self, text: str) -> None:
        self.samples: dict[str, list[dict[str, str]]] = defaultdict(list)
        self._values: dict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                self.samples[sample.name].append(sample.labels)
                self._values[sample.name].append((sample.labels, sample.value))

    def value(self, name: str, **labels: str) -> float:
        """Sum of the samples with these labels."""
        assert name in self._values, name
        return sum(v for has, v in self._values[name] if labels.items() <= has.items())

    def problems(self, expression: str) -> list[str]:
        """What of an expression was not exported."""
        found, problems, labels = names(expression), [], set[str]()
        for metric, matchers in found.selectors:
            samples = self.samples.get(metric, [])
            if not samples and metric not in OF_PROMETHEUS:
                problems.append(f"no metric {metric}")
            labels |= {label for sample in samples for label in sample}
            for label, operator, value in matchers:
                if label in OF_TARGETS:
                    continue
                has = {sample[label] for sample in samples if label in sample}
                # Each alternative by itself, and what is left out too: none may be misspelt.
                wanted = value.split("|") if "~" in operator else [value]
                if has and "$" in value:  # a variable of the dashboard
                    wanted = []
                gone = [each for each in wanted if samples and each not in has]
                problems += [f"no {metric} with {label}={each}" for each in gone]
        foreign = sorted(found.labels - labels - OF_TARGETS)
        return problems + [f"no label {label}" for label in foreign]


def of_dashboard(file: Path) -> dict[str, list[str]]:
    """Expressions of a Grafana dashboard, by panel or variable."""
    board = json.loads(file.read_text())
    found = {
        panel["title"]: [target["expr"] for target in panel["targets"]]
        for panel in board["panels"]
        if panel["type"] != "row"
    }
    for variable in board["templating"]["list"]:
        if variable["type"] == "query":
            # label_values(selector, label): the label counts as one that is grouped by.
            selector, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            ).groups()
            found[variable["name"]] = [f"sum by ({label}) ({selector})"]
    return found


def of_alerts(file: Path) -> dict[str, list[str]]:
    """Expressions of Prometheus' rules, by alert."""
    groups = yaml.safe_load(file.read_text())["groups"]
    return {rule["alert"]: [rule["expr"]] for group in groups for rule in group["rules"]}
