"""Names of properties that clients may set on tables, views and namespaces, and that responses may contain.

pyiceberg, and clients built on it, configure the FileIO of a table with the properties of its metadata: where to send
requests, through which proxy, with which credentials. So a property that one writer sets could redirect the sessions of
all readers. Only these names are allowed (decision 101):

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
from collections.abc import Iterable

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
_WORDS = re.compile(r"[^\W_]+")
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
    words = [word.casefold() for word in _WORDS.findall(_CAPITAL.sub(" ", name))]
    if not words or folded in _RESERVED_NAMES or first in _CLIENT_SEGMENTS or words[0] in _CLIENT_SEGMENTS:
        return False
    named = {*words, *_WORDS.findall(folded)}
    return not named & _CONNECTION_WORDS and not _CREDENTIAL_PAIRS & set(itertools.pairwise(words))


def not_allowed(names: Iterable[str]) -> tuple[str, ...]:
    """Return those names that are not allowed, in order."""
    return tuple(sorted(name for name in names if not is_allowed(name)))
