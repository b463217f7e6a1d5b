"""HDFS 2.7.3 on loopback: a NameNode and three DataNodes, one for each replica of a file.

With one DataNode, each file would take half a second: hdfs-native completes a file as soon as all DataNodes have it,
and waits 500 ms if none of them has reported it to the NameNode. With three DataNodes, one nearly always has.
"""

from __future__ import annotations

import json
import urllib.request
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.servers.daemons import Daemons, ServerStartError, free_port, run
from tests.servers.hdfs_jars import class_path

#: The user of the NameNode process has all permissions.
SUPERUSER = "tests"
#: Hadoop 2.7 needs features that Java versions after 17 no longer have.
_JAVA_HOMES = Path("/usr/lib/jvm")
_JAVA = "java-17-openjdk-*/bin/java"
_OPENED_PACKAGES = ("java.lang", "java.nio", "sun.nio.ch", "java.util")
JAVA_OPTIONS = (
    "-Xmx192m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-XX:-UsePerfData", "-Djava.net.preferIPv4Stack=true",
    "--add-exports=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    "--add-opens=java.security.jgss/sun.security.krb5=ALL-UNNAMED",
    *(f"--add-opens=java.base/{package}=ALL-UNNAMED" for package in _OPENED_PACKAGES),
)  # fmt: skip
#: Subfolder of a cluster's folder, in which its web servers unpack their pages. Killed processes leave them there.
JAVA_FOLDER = "java"
_NAMENODE = "org.apache.hadoop.hdfs.server.namenode.NameNode"
_DATANODE = "org.apache.hadoop.hdfs.server.datanode.DataNode"
_LOGGING = """log4j.rootLogger=WARN,console
log4j.appender.console=org.apache.log4j.ConsoleAppender
log4j.appender.console.target=System.err
log4j.appender.console.layout=org.apache.log4j.PatternLayout
log4j.appender.console.layout.ConversionPattern=%d{HH:mm:ss,SSS} %p %c{2}: %m%n
"""


def java() -> str:
    """Return the path of Java 17. Raises ServerStartError."""
    installations = sorted(_JAVA_HOMES.glob(_JAVA))
    if not installations:
        raise ServerStartError("Java 17 is not installed: it comes with the packages of deploy/debian-packages.txt")
    return str(installations[0])


@dataclass(frozen=True)
class HdfsServer:
    """The address of a server. Each test uses a new folder as the user ``tests``, which has all permissions."""

    namenode_port: int
    http_port: int
    log: Path

    @property
    def storage_options(self) -> dict[str, str]:
        """Storage options for roots on this server."""
        return {}

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables with which roots on this server can be opened without options."""
        return {}

    @property
    def address(self) -> str:
        """Host and port of the NameNode."""
        return f"127.0.0.1:{self.namenode_port}"

    def make_shared_folder(self) -> None:
        """Create the folder in which all users may create roots."""
        self.call("PUT", "/tests", op="MKDIRS", permission="777")

    def fresh_root(self, name: str = "lake", /) -> str:
        """Return the root URI of a new folder that does not exist yet."""
        return f"hdfs://{self.address}/tests/{uuid.uuid4().hex}/{name}/"

    def call(self, method: str, path: str, **query: str) -> dict[str, object]:
        """Call WebHDFS as the superuser, independently of the code under test, and return the response."""
        query = {"user.name": SUPERUSER, **query}
        query_string = "&".join(f"{name}={value}" for name, value in query.items())
        url = f"http://127.0.0.1:{self.http_port}/webhdfs/v1{path}?{query_string}"
        with urllib.request.urlopen(urllib.request.Request(url, method=method), timeout=60) as response:
            document: dict[str, object] = json.loads(response.read() or b"{}")
        return document

    def administer(self, *command: str) -> str:
        """Run a command of ``hdfs dfsadmin`` as the superuser. Starting Java takes one or two seconds."""
        jars = ":".join(map(str, class_path(self.log)))
        program = [java(), *JAVA_OPTIONS, "-cp", jars, "org.apache.hadoop.hdfs.tools.DFSAdmin"]
        return run([*program, "-fs", f"hdfs://{self.address}", *command], self.log, {"HADOOP_USER_NAME": SUPERUSER})

    def delete_all(self, root: str) -> None:
        """Delete the folder of a root from ``fresh_root``."""
        self.call("DELETE", "/" + "/".join(root.split("/")[3:5]), op="DELETE", recursive="true")


class HdfsCluster:
    """The processes of one HDFS cluster, which tests can stop and start individually."""

    def __init__(self, folder: Path, log: Path, n_datanodes: int = 3):
        self.folder = folder
        self.log = log
        self.n_datanodes = n_datanodes
        self.server = HdfsServer(free_port(), free_port(), log)
        self._daemons: dict[str, Daemons] = {}
        self._jars = class_path(log)
        self._java = java()

    def start(self, daemons: Daemons | None = None) -> None:
        """Format the file system and start all processes in parallel. Raises ServerStartError."""
        for name in ("hdfs", "datanode"):
            (self.folder / "conf" / "webapps" / name / "WEB-INF").mkdir(parents=True)
        (self.folder / "conf" / "log4j.properties").write_text(_LOGGING)
        (self.folder / JAVA_FOLDER).mkdir()
        self._configure("conf", {})
        self.start_namenode(daemons, format_first=True)
        for number in range(self.n_datanodes):
            self.start_datanode(number, daemons)
        self.wait_until_ready(self.n_datanodes)

    def start_namenode(self, daemons: Daemons | None = None, *, format_first: bool = False) -> None:
        """Start the NameNode with its existing files."""
        command = self._command(_NAMENODE, "conf")
        if format_first:
            run([*command, "-format", "-force", "-nonInteractive"], self.log, self._environment())
        self._start("namenode", command, daemons)

    def start_datanode(self, number: int = 0, daemons: Daemons | None = None) -> None:
        """Start a DataNode with its existing files."""
        folder = f"datanode-{number}"
        (self.folder / folder).mkdir(exist_ok=True)
        addresses = dict.fromkeys(
            ("dfs.datanode.address", "dfs.datanode.http.address", "dfs.datanode.ipc.address"), "127.0.0.1:0"
        )
        self._configure(folder, {"dfs.datanode.data.dir": f"file://{self.folder / folder / 'data'}", **addresses})
        self._start(folder, self._command(_DATANODE, folder), daemons)

    def stop_namenode(self) -> None:
        """Kill the NameNode."""
        self._daemons.pop("namenode").stop()

    def stop_datanode(self, number: int = 0) -> None:
        """Kill a DataNode."""
        self._daemons.pop(f"datanode-{number}").stop()

    def stop(self) -> None:
        """Kill all processes."""
        for daemons in self._daemons.values():
            daemons.stop()
        self._daemons.clear()

    def wait_until_ready(self, n_datanodes: int = 1) -> None:
        """Wait until this many DataNodes are available and files can be written. Raises ServerStartError."""
        url = f"http://127.0.0.1:{self.server.http_port}/jmx?qry=Hadoop:service=NameNode,name=*"

        def is_ready() -> bool:
            for daemons in self._daemons.values():
                daemons.check()
            try:
                with urllib.request.urlopen(url, timeout=5) as response:
                    beans = {bean["name"].rpartition("=")[2]: bean for bean in json.load(response)["beans"]}
                state = beans["FSNamesystemState"]
                return state["NumLiveDataNodes"] >= n_datanodes and not beans["NameNodeInfo"]["Safemode"]
            except (OSError, KeyError, ValueError):
                return False

        next(iter(self._daemons.values())).wait_until(is_ready, "HDFS")

    def _start(self, name: str, command: list[str], daemons: Daemons | None) -> None:
        self._daemons[name] = daemons or Daemons(self.log)
        self._daemons[name].start(command, self._environment())

    def _environment(self) -> dict[str, str]:
        return {"HADOOP_HOME": str(self.folder), "HADOOP_USER_NAME": SUPERUSER}

    def _command(self, program: str, conf: str) -> list[str]:
        folders = [str(self.folder / conf), str(self.folder / "conf")]
        jars = ":".join([*folders, *map(str, self._jars)])
        properties = {"hadoop.log.dir": self.folder, "java.io.tmpdir": self.folder / JAVA_FOLDER}
        definitions = [f"-D{name}={value}" for name, value in properties.items()]
        return [self._java, *JAVA_OPTIONS, *definitions, "-cp", jars, program]

    def _configure(self, conf: str, overrides: Mapping[str, str]) -> None:
        server, folder = self.server, self.folder
        self._write(
            conf,
            "core-site.xml",
            {
                "fs.defaultFS": f"hdfs://127.0.0.1:{server.namenode_port}",
                "hadoop.tmp.dir": str(folder / "tmp"),
                # Otherwise Hadoop runs a program to look up the groups of users, who do not exist on this machine.
                "hadoop.user.group.static.mapping.overrides": f"{SUPERUSER}=supergroup;stranger=;",
            },
        )
        settings = {
            "dfs.replication": "3",
            "dfs.namenode.name.dir": f"file://{folder / 'name'}",
            "dfs.namenode.rpc-bind-host": "127.0.0.1",
            "dfs.namenode.http-address": f"127.0.0.1:{server.http_port}",
            "dfs.namenode.http-bind-host": "127.0.0.1",
            "dfs.datanode.hostname": "127.0.0.1",
            "dfs.namenode.datanode.registration.ip-hostname-check": "false",
            "dfs.permissions.enabled": "true",
            "dfs.namenode.safemode.extension": "0",
            "dfs.namenode.fs-limits.min-block-size": "0",
            "dfs.heartbeat.interval": "1",
            # Write no new files to a DataNode without a heartbeat for 3 s, which is the minimum in HDFS.
            "dfs.namenode.avoid.write.stale.datanode": "true",
            "dfs.namenode.avoid.read.stale.datanode": "true",
            "dfs.namenode.stale.datanode.interval": "3000",
            "dfs.webhdfs.enabled": "true",
            "dfs.ls.limit": "100",
            "dfs.datanode.directoryscan.threads": "1",
            **overrides,
        }
        self._write(conf, "hdfs-site.xml", settings)

    def _write(self, conf: str, name: str, settings: Mapping[str, str]) -> None:
        properties = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>\n" for key, value in settings.items()
        )
        (self.folder / conf / name).write_text(f"<configuration>\n{properties}</configuration>\n")


def start_hdfs(folder: Path, daemons: Daemons) -> str:
    """Start HDFS, which is killed when the keeper exits, and return its ports. Raises ServerStartError."""
    cluster = HdfsCluster(folder, daemons.log)
    cluster.start(daemons)
    cluster.server.make_shared_folder()
    return f"{cluster.server.namenode_port},{cluster.server.http_port}"


def hdfs_server(kind: str, endpoint: str, folder: Path) -> HdfsServer:
    """Return the HDFS server of a test run. Its log is the log of the keeper."""
    del kind  # required by ``Kind.server``
    namenode_port, http_port = map(int, endpoint.split(","))
    return HdfsServer(namenode_port, http_port, folder.parent / "log")
