"""Properties of Iceberg tables: which clients may set, and which are never believed.

The class that ``write.py-location-provider.impl`` names is imported by pyiceberg. Engines on Java load classes by
properties of the same kind. A person who may write a JSON file into a lakehouse must not decide which code its readers
run.

pyiceberg, and clients built on it, configure the FileIO of a table with the properties of its metadata: where to send
requests, through which proxy, with which credentials. So a property that one writer sets could redirect the sessions of
all readers. Only these names are allowed (decision 10):

* the namespaces in which Iceberg keeps its table properties, and the names that engines set for themselves;
* names below ``user.``, which belong to users;
* other names of users, unless a client could take them for a setting: their first segment belongs to no storage,
  client, engine or library, and no word in them names an address or a credential.

A name has at most :data:`LONGEST_NAME_CHARS` characters, all printable, and no spaces around it. Other spellings of
names in a namespace of Iceberg are not allowed.
"""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Iterable, Mapping

from pyiceberg.table.locations import LocationProvider, ObjectStoreLocationProvider, SimpleLocationProvider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.name_mapping import parse_mapping_from_json
from pyiceberg.table.snapshots import Snapshot

from trinitylake_ops.errors import InvalidDefinitionError

#: The namespace of users: every name below it is allowed.
USER_PREFIX = "user."


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Iceberg's namespaces, the user's, and ours. What they contain configures tables, never connections.
_ALLOWED_PREFIXES = (
    "commit.",
    "compatibility.",
    "engine.hive.",
    "history.",
    "read.",
    "schema.name-mapping.",
    "trinitylake.",
    "write.",
    USER_PREFIX,
)
#: Names that Iceberg and its engines set, which the rules for names of users would reject.
_ALLOWED_NAMES = frozenset(
    {
        "flink.max-continuous-empty-commits",
        "format-version",
        "gc.enabled",
        "option.serialization.format",
        "spark.query-column-names",
        "trino_query_id",
    }
)
#: First segments of settings of storages, clients, engines and their libraries.
_CLIENT_SEGMENTS = _words(
    # storages and their file systems
    "abfs abfss adl adlfs adls aliyun alibaba aws az azure b2 boto3 botocore bos cos cosn dfs ecs fs fsspec ftp gcp gcs"
    " gcsfs github gitlab google gs hadoop hdfs hf http https huggingface ibm ipc jindo lakefs minio nos obs oci"
    " opendal oss ozone r2 s3 s3a s3fs s3n s3tables sftp ssh swift tencent tos ufs viewfs volcengine wasb wasbs webhdfs"
    # catalogs and how clients connect to them
    " auth bigquery biglake catalog client connection dynamodb glue gravitino header headers hive hms io jdbc"
    " lakekeeper metastore nessie oauth oauth2 polaris rest sigv4 signer signing sql table-default"
    " table-override thrift unity"
    # security
    " cert encryption javax jks kerberos keystore kms krb5 ldap mtls sasl ssl tls truststore vault"
    # engines and libraries
    " arrow clickhouse daft dask databricks dremio duckdb fileio flink hbase iceberg java jvm kafka mapred mapreduce"
    " object_store option orc parquet polars presto py py4j pyarrow pyiceberg pyspark ray snowflake spark starrocks"
    " storage trino yarn"
)
#: Settings that clients read under names without a namespace.
_CLIENT_NAMES = _words(
    "audience auth auth.manager buffer-size cabundle cache-enabled client client-pool custom default_netloc"
    " default_scheme downcast-ns-timestamp-to-us-on-write location metadata-location metadata_location"
    " namespace-separator previous_metadata_location prefix profile region resource"
    " root scan-planning-mode scope snapshot-loading-mode username view-endpoints-supported warehouse"
)
#: Settings of ``object_store``, whose prefixes of vendors are optional. Polars passes each property of a table that has
#: no dot to it. With ``allow_invalid_certificates`` it would send sessions to a server with any certificate.
_OBJECT_STORE_NAMES = _words(
    "account_name allow_http allow_invalid_certificates automatic_cleanup backoff base bucket bucket_name"
    " checksum_algorithm conditional_put connect_timeout container_name copy_if_not_exists default_content_type"
    " default_headers default_region disable_bulk_delete disable_tagging dns_resolver fabric_cluster_identifier"
    " file_cache_ttl http1_only http2_keep_alive_interval http2_keep_alive_timeout http2_keep_alive_while_idle"
    " http2_max_frame_size http2_only imdsv1_fallback init_backoff master_key max_backoff max_retries msi_resource_id"
    " no_system_certificates object_id pool_idle_timeout pool_max_idle_per_host randomize_addresses read_timeout"
    " request_payer retry_base_multiplier retry_config retry_init_backoff retry_max_backoff retry_timeout"
    " retry_timeout_ms role_session_name root_certificate root_certificates server_side_encryption skip_signature"
    " sse_bucket_key_enabled sse_customer_key_base64 sse_kms_key_id tenant_id timeout unsigned_payload use_azure_cli"
    " use_emulator user_agent virtual_hosted_style_request"
)
_RESERVED_NAMES = _CLIENT_NAMES | _OBJECT_STORE_NAMES
#: Words that name an address or a credential.
_CONNECTION_WORDS = _words(
    "accesskey accesskeyid accountkey anonymous apikey authority authorization bearer cookie credential credentials"
    " endpoint endpoints host hostname netloc passphrase passwd password privatekey proxies proxy pwd sas"
    " secret secretaccesskey secretkey secrets sessiontoken token tokens uri uris url urls"
)
#: Two words that together name a credential, such as in ``account-key``.
_CREDENTIAL_PAIRS = frozenset(
    {("access", "key"), ("account", "key"), ("api", "key"), ("private", "key"), ("role", "arn"), ("service", "account")}
)
#: The longest name of a property. Longer names are not searched, because one search of a name of megabytes would stop
#: all other threads for seconds.
LONGEST_NAME_CHARS = 4_096
#: A boundary of words: anything but letters and digits, or before a capital letter, as in ``accessKeyId``.
_NAME_WORDS = re.compile(r"[^\W_]+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEGMENT_END = re.compile(r"[.:/]")


def is_allowed(name: str) -> bool:
    """Whether clients may set a property of this name, and responses may contain it."""
    if len(name) > LONGEST_NAME_CHARS or not name.isprintable() or name != name.strip():
        return False
    if name.startswith(_ALLOWED_PREFIXES) or name in _ALLOWED_NAMES:
        return True
    folded = unicodedata.normalize("NFKC", name).casefold()
    if folded != name and folded.startswith(_ALLOWED_PREFIXES) and not folded.startswith(USER_PREFIX):
        return False
    first = _SEGMENT_END.split(folded, maxsplit=1)[0]
    words = [word.casefold() for word in _NAME_WORDS.findall(_CAPITAL.sub(" ", name))]
    if not words or folded in _RESERVED_NAMES or first in _CLIENT_SEGMENTS or words[0] in _CLIENT_SEGMENTS:
        return False
    named = {*words, *_NAME_WORDS.findall(folded)}
    return not named & _CONNECTION_WORDS and not _CREDENTIAL_PAIRS & set(itertools.pairwise(words))


def not_allowed(names: Iterable[str]) -> tuple[str, ...]:
    """Return those names that are not allowed, in order."""
    return tuple(sorted(name for name in names if not is_allowed(name)))


#: Properties that would put files beyond the table's own prefix.
PATH_PROPERTIES = ("write.data.path", "write.metadata.path", "write.folder-storage.path", "write.object-storage.path")

#: Names that Iceberg reserves for the metadata itself. A client takes them as instructions: for ``format-version``, it
#: upgrades the table. Stored as properties they mean nothing.
RESERVED_PROPERTIES = frozenset(
    {
        "format-version",
        "uuid",
        "snapshot-count",
        "current-snapshot-summary",
        "current-snapshot-id",
        "current-snapshot-timestamp-ms",
        "current-schema",
        "default-partition-spec",
        "default-sort-order",
    }
)

#: The endings of names of properties whose values engines load as a class, such as ``write.py-location-provider.impl``,
#: ``encryption.kms-impl`` and ``client.factory``.
_CODE_ENDING = re.compile(r"(?:^|[.-])(?:impl|factory)\Z")
#: Parquet's Java library loads its factories of keys by these. A signer signs requests at an address of its own.
_CODE_PREFIXES = ("parquet.crypto.", "parquet.encryption.", "s3.signer")
#: The endings of names of properties whose values pyiceberg takes for whole numbers, without a check.
_NUMBER_ENDING = re.compile(r"(-bytes|-ms|-limit|num-retries|-level|-max|min-count-to-merge|snapshots-to-keep)\Z")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
#: A writer makes steps of these sizes: with 0 it fails, or never ends.
_POSITIVE_ENDING = re.compile(r"(-bytes|-limit|min-count-to-merge)\Z")
_LEVEL = re.compile(r"-?[0-9]{1,2}", re.ASCII)  # a level of compression
#: The endings of names of properties whose values pyiceberg takes for truth values, and the values that it takes.
_TRUTH_ENDING = re.compile(r"(?:\.enabled|\.partitioned-paths)\Z")
_TRUTHS = frozenset({"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"})
_FORMATS = frozenset({"avro", "orc", "parquet"})
#: The words that Iceberg's libraries know for a property. A writer that lacks one of them says so.
_WORDS = {
    "write.format.default": _FORMATS,
    "write.delete.format.default": _FORMATS,
    "write.parquet.compression-codec": frozenset(
        {"brotli", "gzip", "lz4", "lz4_raw", "lzo", "none", "snappy", "uncompressed", "zstd"}
    ),
}
_METRICS = "write.metadata.metrics."
_METRICS_MODE = re.compile(r"\s*(?:none|counts|full|truncate\([1-9][0-9]{0,8}\))\s*", re.ASCII | re.IGNORECASE)
#: Names of counts in the summaries of snapshots.
_COUNT = re.compile(
    r"(?:total|added|deleted|removed)-"
    r"(?:records|data-files|files-size|delete-files|(?:position|equality)-delete(?:s|-files))"
)
_NAME_MAPPING = "schema.name-mapping.default"
_OBJECT_STORE = "write.object-storage.enabled"


def names_code(name: str) -> bool:
    """Whether an engine may load the value of a property as code. Names that are too long are not allowed anyway."""
    if len(name) > LONGEST_NAME_CHARS:
        return False
    folded = name.strip().casefold()
    return folded.startswith(_CODE_PREFIXES) or _CODE_ENDING.search(folded) is not None


def naming_code(names: Iterable[str]) -> tuple[str, ...]:
    """Return those property names whose values may be loaded as code, in order."""
    return tuple(sorted(name for name in names if names_code(name)))


def meaningless(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of Iceberg's properties with useless values: pyiceberg fails by them, without a typed error."""
    return tuple(
        name for name, value in properties.items() if len(name) <= LONGEST_NAME_CHARS and not _has_meaning(name, value)
    )


def _has_meaning(name: str, value: str) -> bool:
    if name in RESERVED_PROPERTIES:
        return False
    if name.startswith(_METRICS) and (name.endswith(".default") or ".column." in name):
        return _METRICS_MODE.fullmatch(value) is not None
    if name == _NAME_MAPPING:
        return _is_name_mapping(value)
    if name in _WORDS:
        return value.lower() in _WORDS[name]
    if name.startswith(("write.", "commit.", "history.")) and _TRUTH_ENDING.search(name):
        return value.lower() in _TRUTHS
    if name.startswith(("write.", "commit.", "history.")) and _NUMBER_ENDING.search(name):
        if name.endswith("-level"):
            return _LEVEL.fullmatch(value) is not None
        return _NUMBER.fullmatch(value) is not None and (int(value) > 0 or not _POSITIVE_ENDING.search(name))
    return True


def _is_name_mapping(text: str) -> bool:
    try:
        parse_mapping_from_json(text)
    except Exception:  # noqa: BLE001 - of what is no mapping its validators raise anything at all
        return False
    return True


def leave_out_meaningless_counts(snapshots: Iterable[Snapshot]) -> None:
    """Remove counts that are no numbers from the summaries of snapshots, just parsed. A commit would fail by them.

    Counts only inform, and no rows depend on them.
    """
    for snapshot in snapshots:
        counted = {} if snapshot.summary is None else snapshot.summary.additional_properties
        for name in [name for name, value in counted.items() if _COUNT.fullmatch(name) and not _is_count(value)]:
            del counted[name]


def _is_count(value: object) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def check_not_reserved(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for a property of a table by which Iceberg's clients mean the metadata itself."""
    for name in names:
        if name in RESERVED_PROPERTIES:
            raise InvalidDefinitionError(
                f"property {name!r} cannot be set: Iceberg reserves it; upgrade the format version instead"
            )


def check_settable(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for properties that clients may not set.

    These are properties that name code, those that a client could take for a setting of its connection, and those whose
    names are too long.
    """
    names = list(names)
    if long := next((name for name in names if len(name) > LONGEST_NAME_CHARS), None):
        raise InvalidDefinitionError(
            f"property {long[:100]!r} cannot be set: its name has {len(long)} characters, more than"
            f" {LONGEST_NAME_CHARS}; choose a shorter name"
        )
    if found := naming_code(names):
        raise InvalidDefinitionError(
            f"property {found[0][:100]!r} cannot be set: no property of a table may name code that others would run;"
            " leave it out"
        )
    if refused := not_allowed(names):
        raise InvalidDefinitionError(
            f"property {refused[0][:100]!r} cannot be set: a client that reads it could take it for a setting of its"
            f" connection; a property of your own can be named {f'{USER_PREFIX}{refused[0].strip()}'[:100]!r}"
        )


def usable(properties: Mapping[str, str]) -> dict[str, str]:
    """Return properties without those that clients may not set."""
    return {name: value for name, value in properties.items() if is_allowed(name) and not names_code(name)}


def location_provider(metadata: TableMetadata) -> LocationProvider:
    """Return the object that chooses the places of a table's new files: always one of pyiceberg's own two."""
    properties = usable(metadata.properties)
    is_hashed = properties.get(_OBJECT_STORE, "").lower() == "true"
    provider = ObjectStoreLocationProvider if is_hashed else SimpleLocationProvider
    return provider(metadata.location.rstrip("/"), properties)
