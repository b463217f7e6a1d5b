#!/usr/bin/env bash
# Stores the classes that a Spark session loads in the archive .venv/spark.jsa, which halves the start-up time of each JVM
# in the tests. A JVM with another Java or other jars ignores the archive. Prints the JVM options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

archive=$PWD/.venv/spark.jsa
quiet="-Xlog:cds*=off"

# Runs in the background: a JVM that starts before the archive is complete, or without one, only starts more slowly.
write_archive() {
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # The JVM writes the archive after the program has ended: the pipe waits for both.
    # The complete archive is renamed, so that a concurrent test run never reads a partial one.
    SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$archive.$$ $quiet" .venv/bin/python - "$work" <<'EOF' 2>&1 | cat >&2
import sys

from trinitylake_ops.spark.session import session_scope

with session_scope("classes") as spark:
    spark.range(100).selectExpr("id", "id % 7 as kind").write.parquet(f"{sys.argv[1]}/rows")
    spark.read.parquet(f"{sys.argv[1]}/rows").groupBy("kind").count().collect()
    spark.sparkContext.parallelize(range(4), 2).map(str).collect()
EOF
    mv -f "$archive.$$" "$archive"
}

echo "-XX:SharedArchiveFile=$archive $quiet"
if [ ! -e "$archive" ] || [ "$archive" -ot .venv/.installed ]; then
    (write_archive >/dev/null 2>&1 &)
fi
