"""Properties of Iceberg tables: which names clients may set, and which are ignored on read.

PyIceberg imports the class that ``write.py-location-provider.impl`` names, and Java engines load classes by similar
properties. Write access to a JSON file of a lakehouse must not allow anyone to choose the code that its readers run.

PyIceberg, and clients built on it, configure the FileIO of a table with the properties of its metadata: endpoint,
proxy, credentials. A property set by one writer could therefore redirect the sessions of all readers. Only these names
are allowed (decision 10):

* the namespaces in which Iceberg keeps its table properties, and the names that engines set for themselves; * names
below ``user.``, which belong to users; * other user-defined names, unless a client could interpret them as a setting:
their first segment must not be that of a storage, client, engine or library, and no word in them may denote an address
or a credential.

A name has at most :data:`MAX_NAME_CHARS` characters, all of them printable, and no surrounding spaces. Alternative
spellings of names in an Iceberg namespace are not allowed.
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

#: The namespace of users, in which every name is allowed.
USER_PREFIX = "user."


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


#: Namespaces of Iceberg, of users and of this package. Properties in them configure tables, never connections.
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
#: Names that Iceberg and its engines set, but that the rules for user-defined names would reject.
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
#: First segments of the setting names of storages, clients, engines and their libraries.
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
#: Settings of ``object_store``, whose vendor prefixes are optional. Polars passes all table properties without a dot to
#: it. With ``allow_invalid_certificates``, it would send credentials to a server with any certificate.
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
#: Words that denote an address or a credential.
_CONNECTION_WORDS = _words(
    "accesskey accesskeyid accountkey anonymous apikey authority authorization bearer cookie credential credentials"
    " endpoint endpoints host hostname netloc passphrase passwd password privatekey proxies proxy pwd sas"
    " secret secretaccesskey secretkey secrets sessiontoken token tokens uri uris url urls"
)
#: Pairs of words that together denote a credential, as in ``account-key``.
_CREDENTIAL_PAIRS = frozenset(
    {("access", "key"), ("account", "key"), ("api", "key"), ("private", "key"), ("role", "arn"), ("service", "account")}
)
#: Maximum length of a property name. Longer names are not searched, because searching a name of megabytes would block
#: all other threads for seconds.
MAX_NAME_CHARS = 4_096
#: Word boundaries are characters other than letters and digits, and positions before a capital letter, as in
#: ``accessKeyId``.
_NAME_WORDS = re.compile(r"[^\W_]+")
_CAPITAL = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_SEGMENT_END = re.compile(r"[.:/]")


def is_allowed(name: str) -> bool:
    """Whether clients may set a property with this name, and responses may contain the property."""
    if len(name) > MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
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
    all_words = {*words, *_NAME_WORDS.findall(folded)}
    return not all_words & _CONNECTION_WORDS and not _CREDENTIAL_PAIRS & set(itertools.pairwise(words))


def not_allowed(names: Iterable[str]) -> tuple[str, ...]:
    """Return the names that are not allowed, sorted."""
    return tuple(sorted(name for name in names if not is_allowed(name)))


#: Properties that would move files out of the table's location.
PATH_PROPERTIES = ("write.data.path", "write.metadata.path", "write.folder-storage.path", "write.object-storage.path")

#: Names that Iceberg reserves. Clients interpret them as instructions: setting ``format-version`` upgrades the table.
#: As stored properties they have no effect.
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

#: Suffixes of properties whose values engines load as a class, such as ``write.py-location-provider.impl``,
#: ``encryption.kms-impl`` and ``client.factory``.
_CODE_SUFFIX = re.compile(r"(?:^|[.-])(?:impl|factory)\Z")
#: Parquet's Java library loads key factories by these properties. A signer sends requests to the address in its
#: property.
_CODE_PREFIXES = ("parquet.crypto.", "parquet.encryption.", "s3.signer")
#: Suffixes of properties whose values PyIceberg parses as integers without validation.
_NUMBER_SUFFIX = re.compile(r"(-bytes|-ms|-limit|num-retries|-level|-max|min-count-to-merge|snapshots-to-keep)\Z")
_NUMBER = re.compile(r"[0-9]{1,18}", re.ASCII)
#: Suffixes of properties that writers use as step sizes: with 0, writers fail or never finish.
_POSITIVE_SUFFIX = re.compile(r"(-bytes|-limit|min-count-to-merge)\Z")
_LEVEL = re.compile(r"-?[0-9]{1,2}", re.ASCII)  # compression level
#: Suffixes of properties whose values PyIceberg parses as booleans, and the accepted values.
_BOOLEAN_SUFFIX = re.compile(r"(?:\.enabled|\.partitioned-paths)\Z")
_BOOLEANS = frozenset({"y", "yes", "t", "true", "on", "1", "n", "no", "f", "false", "off", "0"})
_FORMATS = frozenset({"avro", "orc", "parquet"})
#: Values that Iceberg's libraries define for a property. A writer that does not support a value reports an error.
_ENUM_VALUES = {
    "write.format.default": _FORMATS,
    "write.delete.format.default": _FORMATS,
    "write.parquet.compression-codec": frozenset(
        {"brotli", "gzip", "lz4", "lz4_raw", "lzo", "none", "snappy", "uncompressed", "zstd"}
    ),
}
_METRICS = "write.metadata.metrics."
_METRICS_MODE = re.compile(r"\s*(?:none|counts|full|truncate\([1-9][0-9]{0,8}\))\s*", re.ASCII | re.IGNORECASE)
#: Names of counts in snapshot summaries.
_COUNT = re.compile(
    r"(?:total|added|deleted|removed)-"
    r"(?:records|data-files|files-size|delete-files|(?:position|equality)-delete(?:s|-files))"
)
_NAME_MAPPING = "schema.name-mapping.default"
_OBJECT_STORE = "write.object-storage.enabled"


def names_code(name: str) -> bool:
    """Whether an engine may load the value of a property as code. False for names that exceed the maximum."""
    if len(name) > MAX_NAME_CHARS:
        return False
    folded = name.strip().casefold()
    return folded.startswith(_CODE_PREFIXES) or _CODE_SUFFIX.search(folded) is not None


def naming_code(names: Iterable[str]) -> tuple[str, ...]:
    """Return the property names whose values may be loaded as code, sorted."""
    return tuple(sorted(name for name in names if names_code(name)))


def invalid_properties(properties: Mapping[str, str]) -> tuple[str, ...]:
    """Return the names of Iceberg properties with invalid values, for which PyIceberg raises no typed error."""
    return tuple(
        name for name, value in properties.items() if len(name) <= MAX_NAME_CHARS and not _is_valid(name, value)
    )


def _is_valid(name: str, value: str) -> bool:
    if name in RESERVED_PROPERTIES:
        return False
    if name.startswith(_METRICS) and (name.endswith(".default") or ".column." in name):
        return _METRICS_MODE.fullmatch(value) is not None
    if name == _NAME_MAPPING:
        return _is_name_mapping(value)
    if name in _ENUM_VALUES:
        return value.lower() in _ENUM_VALUES[name]
    if name.startswith(("write.", "commit.", "history.")) and _BOOLEAN_SUFFIX.search(name):
        return value.lower() in _BOOLEANS
    if name.startswith(("write.", "commit.", "history.")) and _NUMBER_SUFFIX.search(name):
        if name.endswith("-level"):
            return _LEVEL.fullmatch(value) is not None
        return _NUMBER.fullmatch(value) is not None and (int(value) > 0 or not _POSITIVE_SUFFIX.search(name))
    return True


def _is_name_mapping(text: str) -> bool:
    try:
        parse_mapping_from_json(text)
    except Exception:  # noqa: BLE001 - its validators raise arbitrary exceptions
        return False
    return True


def remove_invalid_counts(snapshots: Iterable[Snapshot]) -> None:
    """Remove counts that are not numbers from the summaries of new snapshots: commits would fail on them.

    Counts are informative only. No rows depend on them.
    """
    for snapshot in snapshots:
        summary = {} if snapshot.summary is None else snapshot.summary.additional_properties
        for name in [name for name, value in summary.items() if _COUNT.fullmatch(name) and not _is_count(value)]:
            del summary[name]


def _is_count(value: object) -> bool:
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def check_not_reserved(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for a table property that Iceberg reserves."""
    for name in names:
        if name in RESERVED_PROPERTIES:
            raise InvalidDefinitionError(
                f"property {name!r} cannot be set: Iceberg reserves it; upgrade the format version instead"
            )


def check_settable(names: Iterable[str]) -> None:
    """Raise InvalidDefinitionError for properties that clients may not set.

    These are properties that name classes, that a client could interpret as a connection setting, or that have too long
    a name.
    """
    names = list(names)
    if long_name := next((name for name in names if len(name) > MAX_NAME_CHARS), None):
        raise InvalidDefinitionError(
            f"property {long_name[:100]!r} cannot be set: its name has {len(long_name)} characters, more than"
            f" {MAX_NAME_CHARS}; choose a shorter name"
        )
    if code_names := naming_code(names):
        raise InvalidDefinitionError(
            f"property {code_names[0][:100]!r} cannot be set: its value names a class that other clients would load;"
            " leave it out"
        )
    if rejected := not_allowed(names):
        raise InvalidDefinitionError(
            f"property {rejected[0][:100]!r} cannot be set: clients could interpret it as a connection setting; use a"
            f" name such as {f'{USER_PREFIX}{rejected[0].strip()}'[:100]!r} for a custom property"
        )


def settable_properties(properties: Mapping[str, str]) -> dict[str, str]:
    """Return the properties that clients may set."""
    return {name: value for name, value in properties.items() if is_allowed(name) and not names_code(name)}


def location_provider(metadata: TableMetadata) -> LocationProvider:
    """Return the location provider for a table's new files, always one of PyIceberg's two built-in providers."""
    properties = settable_properties(metadata.properties)
    is_hashed = properties.get(_OBJECT_STORE, "").lower() == "true"
    provider = ObjectStoreLocationProvider if is_hashed else SimpleLocationProvider
    return provider(metadata.location.rstrip("/"), properties)
