"""Links to pages of the Dagster UI: launchpads with a prefilled configuration, and runs."""

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

#: Tag of a run with the code location of its definitions, as ``REPOSITORY@LOCATION``. Dagster sets it on launch.
REPOSITORY_TAG = ".dagster/repository"


def code_location_of(run: dg.DagsterRun) -> str | None:
    """Return the code location of a run as ``REPOSITORY@LOCATION``, the form that UI paths use.

    Returns None for a run that was started without a code location, for example in a test. A run that exists only in
    memory has an origin but no tag; Dagster adds the tag when it stores the run.
    """
    origin = run.remote_job_origin
    return run.tags.get(REPOSITORY_TAG) if origin is None else origin.repository_origin.get_label()


def launchpad_path(code_location: str, job: str, config: str) -> str:
    """Return the UI path of a job's launchpad with a configuration in YAML or JSON.

    Args:
        code_location: The code location as ``REPOSITORY@LOCATION``.
        job: The job name.
        config: The configuration.
    """
    return (
        f"/locations/{quote(code_location, safe='@')}/jobs/{quote(job)}/playground/setup"
        f"?mode=default&config={quote(config, safe='')}"
    )


#: Maximum length of a configuration in a link. Webservers and proxies reject URLs that are a few times longer.
MAX_CONFIG_CHARS = 6_000


@dataclass(frozen=True, slots=True)
class Links:
    """Links to the jobs of a lakehouse in a code location, and to runs."""

    names: LakehouseNames
    #: The code location as ``REPOSITORY@LOCATION``.
    code_location: str = ""
    #: Jobs of the code location. There are no links to other jobs.
    jobs: frozenset[str] = frozenset()
    #: URL of the webserver. If empty, links are relative to the current host.
    base: str = ""

    @classmethod
    def of(cls, context: RunContext, names: LakehouseNames, base: str) -> Links:
        """Create the links of a run.

        Args:
            context: The run context.
            names: The names of the lakehouse's definitions.
            base: The URL of the webserver, or an empty string.
        """
        return cls.at(repository_of(context), code_location_of(context.run), names, base)

    @classmethod
    def at(
        cls, repository: dg.RepositoryDefinition | None, code_location: str | None, names: LakehouseNames, base: str
    ) -> Links:
        """Create the links of a code location. If it is unknown, as in a test, there are only links to runs.

        Args:
            repository: The definitions of the code location.
            code_location: The code location as ``REPOSITORY@LOCATION``.
            names: The names of the lakehouse's definitions.
            base: The URL of the webserver, or an empty string.
        """
        if repository is None or code_location is None:
            return cls(names, base=base.rstrip("/"))
        return cls(names, code_location, frozenset(repository.job_names), base.rstrip("/"))

    def launchpad(self, job: str, config: Mapping[str, Any], text: str = "") -> Link | None:
        """Return a link to the launchpad of a job.

        Args:
            job: The unprefixed name of the job.
            config: The configuration to prefill. A value of None is left empty for the user.
            text: The link text. Defaults to ``open JOB``.

        Returns:
            The link, or None if the code location does not have the job or the configuration is too long for a link.
        """
        job_name, config_text = self.names.of(job), config_yaml(config)
        if job_name not in self.jobs or len(config_text) > MAX_CONFIG_CHARS:
            return None
        return Link(
            text or f"open {job_name}", f"{self.base}{launchpad_path(self.code_location, job_name, config_text)}"
        )

    def roll_back(self, version: int, text: str, table: str | None = None) -> Link | None:
        """Return a link that plans a rollback to a version.

        Args:
            version: The version.
            text: The link text.
            table: The table to roll back, as ``namespace.table``. By default, everything is rolled back.

        Returns:
            The link, or None if no link is possible or the table name contains more than one dot, so that its namespace
            would be ambiguous.
        """
        if table is not None and table.count(".") != 1:
            return None
        config = {"to": {"version": version}, **({} if table is None else {"tables": [table]})}
        return self.launchpad("rollback", config, text)

    def run(self, run_id: str) -> Link:
        """Return a link to a run of this Dagster instance."""
        return Link(run_id[:8], f"{self.base}/runs/{quote(run_id, safe='')}")

    def entry(self, job: str, config: Mapping[str, Any], text: str = "") -> dict[str, Any]:
        """Return a metadata entry with the link to a launchpad, or no entry if there is no link.

        Args:
            job: The unprefixed name of the job.
            config: The configuration to prefill.
            text: The link text.
        """
        link = self.launchpad(job, config, text)
        return {} if link is None else {f"open {self.names.of(job)}": link_metadata(link)}


def rollback_link_text(version: int, warnings: Sequence[str]) -> str:
    """Return the text of a link that rolls back to a version.

    Args:
        version: The version.
        warnings: Reasons not to roll back to the version, for example ``undone by 3``. Empty strings are ignored.
    """
    reasons = ", ".join(filter(None, warnings))
    return f"roll back to {version}" + (f" ({reasons})" if reasons else "")


def config_yaml(config: Mapping[str, Any], indent: str = "") -> str:
    """Return a configuration as YAML for the launchpad, one option per line. A value of None is left empty.

    Args:
        config: The configuration.
        indent: The indentation of each line.
    """
    lines = []
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:\n{config_yaml(value, indent + '  ')}")
        else:
            lines.append(f"{indent}{name}: {'' if value is None else _yaml(value)}\n")
    return "".join(lines)


def _yaml(value: Any) -> str:
    """Return a value as JSON, escaping the non-printable characters that JSON allows but YAML does not."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in text)
