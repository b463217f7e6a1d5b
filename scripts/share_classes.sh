#!/usr/bin/env bash
# Keeps the classes that a Spark session loads in an archive, .venv/spark.jsa: each JVM of the tests then starts in half
# the time. A JVM that the archive does not fit, another Java or other jars, leaves it alone. Prints the JVM's switches.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

archive=$PWD/.venv/spark.jsa
quiet="-Xlog:cds*=off"

if [ ! -e "$archive" ] || [ "$archive" -ot .venv/.installed ]; then
    work=$(mktemp -d)
    trap 'rm -rf "$work"' EXIT
    # The JVM writes when the program has ended: the pipe waits for both.
    # Renamed when it is whole: a test run that starts meanwhile finds none, or a whole one.
    SPARK_SUBMIT_OPTS="-XX:ArchiveClassesAtExit=$archive.$$ $quiet" .venv/bin/python - "$work" <<'EOF' 2>&1 | cat >&2
import sys

from trinitylake_ops.spark.session import session_scope

with session_scope("classes") as spark:
    spark.range(100).selectExpr("id", "id % 7 as kind").write.parquet(f"{sys.argv[1]}/rows")
    spark.read.parquet(f"{sys.argv[1]}/rows").groupBy("kind").count().collect()
    spark.sparkContext.parallelize(range(4), 2).map(str).collect()
EOF
    mv -f "$archive.$$" "$archive"
fi
echo "-XX:SharedArchiveFile=$archive $quiet"
