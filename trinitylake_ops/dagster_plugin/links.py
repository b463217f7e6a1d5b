"""Links to pages of Dagster: launchpads with a prefilled configuration, and runs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import dagster as dg

from trinitylake_ops.dagster_plugin._dagster_internals import RunContext, repository_of
from trinitylake_ops.dagster_plugin.metadata import link_metadata
from trinitylake_ops.dagster_plugin.names import LakehouseNames
from trinitylake_ops.declarations.rendering import Link

#: The tag of a run that says where its definitions are, as ``REPOSITORY@LOCATION``. Whatever launches runs sets it.
REPOSITORY_TAG = ".dagster/repository"


def code_location_of(run: dg.DagsterRun) -> str | None:
    """Return where the definitions of a run are, as ``REPOSITORY@LOCATION``, which is how paths of the UI name it.

    It is None for a run that was started without a code location, such as that of a test. The database of Dagster adds
    the tag when a run is stored: the run itself only knows its origin.
    """
    origin = run.remote_job_origin
    return run.tags.get(REPOSITORY_TAG) if origin is None else origin.repository_origin.get_label()


def launchpad_path(place: str, job: str, config: str) -> str:
    """Return the path, below the UI's address, of the launchpad of a job with a configuration in YAML or JSON."""
    return (
        f"/locations/{quote(place, safe='@')}/jobs/{quote(job)}/playground/setup"
        f"?mode=default&config={quote(config, safe='')}"
    )


#: Of a configuration in a link. Webservers and proxies refuse addresses of some multiples of it.
LONGEST_CONFIG_CHARS = 6_000


@dataclass(frozen=True, slots=True)
class Links:
    """Links to the jobs of a lakehouse in a code location, ``place``, and to runs.

    ``base`` is the address of the webserver. Without one, links lead to the host of the page that shows them. There are
    no links to jobs that the code location does not have.
    """

    names: LakehouseNames
    place: str = ""
    jobs: frozenset[str] = frozenset()
    base: str = ""

    @classmethod
    def of(cls, context: RunContext, names: LakehouseNames, base: str) -> Links:
        """Return the links of a run."""
        return cls.at(repository_of(context), code_location_of(context.run), names, base)

    @classmethod
    def at(
        cls, repository: dg.RepositoryDefinition | None, place: str | None, names: LakehouseNames, base: str
    ) -> Links:
        """Return the links of a code location, those to runs alone where it is not known, as in a test."""
        if repository is None or place is None:
            return cls(names, base=base.rstrip("/"))
        return cls(names, place, frozenset(repository.job_names), base.rstrip("/"))

    def launchpad(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link that opens the launchpad of a job, by its name for a lakehouse alone.

        ``config`` fills it in; None as a value is for a person to write. ``text`` is by default the job's name. None is
        returned for a job that is not there, and for a configuration that is too long for a link.
        """
        named, config_text = self.names.of(job), config_yaml(config)
        if named not in self.jobs or len(config_text) > LONGEST_CONFIG_CHARS:
            return None
        return Link(text or f"open {named}", f"{self.base}{launchpad_path(self.place, named, config_text)}")

    def roll_back(self, version: int, text: str, table: str | None = None) -> Link | None:
        """Return a link to the plan that returns to a version, of one table alone if it is named.

        A name with further dots cannot be written there, as it would not say which part is the namespace.
        """
        if table is not None and table.count(".") != 1:
            return None
        config = {"to": {"version": version}, **({} if table is None else {"tables": [table]})}
        return self.launchpad("rollback", config, text)

    def run(self, run_id: str) -> Link:
        """Return a link to a run of this Dagster instance."""
        return Link(run_id[:8], f"{self.base}/runs/{quote(run_id, safe='')}")

    def entry(self, job: str, config: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Return a metadata entry with the link to a launchpad, nothing where there is none."""
        link = self.launchpad(job, config, text)
        return {} if link is None else {f"open {self.names.of(job)}": link_metadata(link)}


def rollback_link_text(version: int, doubts: Sequence[str]) -> str:
    """Return the text of a link that goes back to a version, with what speaks against it, such as ``undone by 3``."""
    known = ", ".join(filter(None, doubts))
    return f"go back to {version}" + (f" ({known})" if known else "")


def config_yaml(config: Mapping[str, Any], indent: str = "") -> str:
    """Return a configuration as the launchpad takes it, one option a line. A value of None is left to be written."""
    lines = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:\n{config_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {'' if value is None else _yaml(value)}\n")
    return "".join(lines)


def _yaml(value: Any) -> str:
    """Return a value as JSON, which YAML is a superset of but for characters that it does not print."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
