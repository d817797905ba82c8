"""What is hidden before it is put on record or shown, and what stays readable."""

import pytest

from prefect_torch_ddp.records.hiding import HIDDEN, hidden, without_credentials

SECRET_NAMES = """
api_key apikey token tokens hf_token hfToken githubToken slackToken apiToken bearerToken
HF_TOKEN password db_pwd pwd passcode passphrase wandb_key encryption_key account_key
signing_key ssh_key license_key sas connection_string connectionString dsn Authorization
bearer cookie aws_secret auth pat AWS_SECRET_ACCESS_KEY access_key_id model.api_key
PGPASSWORD dbpassword clientsecret mypasswd awssecretaccesskey dbpass wandbapikey DBPassword
githubaccesstoken token2 password_2
"""
ORDINARY_NAMES = """
tokenizer num_tokens max_tokens pad_token eos_token eos_token_id cls_token mask_token
token_dropout token_dim token_type max_token_len per_token_loss token_limit pass_words
n_token token_level stop_tokens key sort_key run_key cache_key image_key query_key
keyboard monkey forward_pass author authority 2pass secretary compass bypass
"""


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_the_value_of_a_name_like_a_secrets_is_hidden(name: str) -> None:
    """A text under such a name never stays."""
    assert hidden(name, "V") == HIDDEN
    assert hidden("options", {name: "V"}) == {name: HIDDEN}


@pytest.mark.parametrize("name", ORDINARY_NAMES.split())
@pytest.mark.parametrize("value", ["<pad>", 2, True, None, 0.5], ids=repr)
def test_the_value_of_an_ordinary_name_stays(name: str, value: object) -> None:
    """Options of language models, and keys that sort or join, are shown."""
    assert hidden(name, value) == value


@pytest.mark.parametrize("name", ["token", "api_key", "secret_santa_rows"])
def test_a_number_is_no_key(name: str) -> None:
    """Only a password may be a number."""
    assert hidden(name, 12) == 12
    assert hidden("db_password", 12345678) == HIDDEN


@pytest.mark.parametrize("name", ["api_key", "DB_PASS", "PGPASSWORD", "password1"])
def test_a_long_number_under_a_secrets_name_is_hidden(name: str) -> None:
    """Passwords and keys may have digits only."""
    assert hidden(name, 1234) == HIDDEN
    assert without_credentials(f"{name}=1234, lr=0.1") == f"{name}={HIDDEN}, lr=0.1"


@pytest.mark.parametrize("name", ["max_tokens", "batch_tokens", "eos_token_id", "num_keys"])
def test_a_long_number_of_tokens_stays(name: str) -> None:
    """Sizes and indices of language models are numbers."""
    assert hidden(name, 128256) == 128256
    assert without_credentials(f"{name}=128256") == f"{name}=128256"


@pytest.mark.parametrize("name", ["api_keys", "credentials", "clientsecrets"])
def test_a_mapping_under_a_secrets_name_is_hidden_as_a_whole(name: str) -> None:
    """Its own names say nothing."""
    assert hidden(name, {"openai": "x"}) == HIDDEN


REFERENCES = [
    {"valueFrom": {"secretKeyRef": {"name": "prefect", "key": "auth-string", "optional": True}}},
    {"envFrom": [{"secretRef": {"name": "s3-credentials"}}]},
    {"imagePullSecrets": [{"name": "registry"}, {"name": "other.registry"}]},
    {"secretName": "s3"},
    {"volumes": [{"name": "keys", "secret": {"secretName": "s3", "defaultMode": 256}}]},
    {"secret": {"secretName": "s3", "items": [{"key": "id", "path": "aws/id"}]}},
]


@pytest.mark.parametrize("value", REFERENCES, ids=lambda value: next(iter(value)))
def test_where_kubernetes_has_a_secret_stays(value: dict[str, object]) -> None:
    """The name of a secret's object was hidden, so the run's record couldn't be used."""
    assert hidden("cluster", value) == value


@pytest.mark.parametrize(
    "value",
    [
        {"secretKeyRef": "V"},
        {"secretKeyRef": {"name": "V v", "key": "x"}},
        {"secretKeyRef": {"key": "x"}},
        {"secretRef": {"name": "prefect", "password": "V"}},
        {"secretRef": {"name": "prefect", "stringData": {"x": "V"}}},
        {"secretName": "V v"},
        {"secretName": "abcdefgh1234567890ijklmn"},
        {"secret_name": "prefect"},
        {"secret": {"name": "prefect"}},
        {"secret": {"secretName": "s3", "data": {"x": "V"}}},
        {"secret": {}},
        {"imagePullSecrets": ["V"]},
        {"imagePullSecrets": [{"name": "registry", "value": "V"}]},
    ],
    ids=repr,
)
def test_what_only_looks_like_a_reference_is_hidden(value: dict[str, object]) -> None:
    """Another shape may be the secret itself; only Kubernetes' own fields and names pass."""
    ((name, inner),) = value.items()
    expected = [HIDDEN] if isinstance(inner, list) else HIDDEN
    assert hidden("cluster", value) == {name: expected}


def test_a_secret_within_a_reference_is_hidden() -> None:
    """Its values are judged as others are."""
    reference = {"name": "prefect", "key": "abcdefgh1234567890ijklmn"}
    found = hidden("env", {"secretKeyRef": reference})
    assert found == {"secretKeyRef": {"name": "prefect", "key": HIDDEN}}


SECRET_TEXTS = {
    "postgresql://user:p@SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:pa/SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:p#SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:p?SSS@host:5432/db?x=1": "postgresql://(hidden)@host:5432/db?x=1",
    "postgresql://user:pa/s#SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:p@ss#SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:12#SSS@host/db": "postgresql://(hidden)@host/db",
    "redis://:p#SSS@host:6379/0": "redis://(hidden)@host:6379/0",
    "postgresql://user:p@s/s#SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:p@s/s?SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:p?x=SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://user:12,SSS@host/db": "postgresql://(hidden)@host/db",
    "postgresql://me:p@x/y?name=SSS@host/db": "postgresql://(hidden)@host/db",
    "https://me:SSS@host/x?mail=a@b.org": "https://(hidden)@b.org",
    "https://me:p@SSS@[::1]:80/x?mail=a@b": "https://(hidden)@b",
    "mongodb://u:SSS@acct.x:10255/?a=b&appName=@acct@": "mongodb://(hidden)@",
    "mongodb://u:SSS@h1:1,h2:2/?appName=@x@": "mongodb://(hidden)@",
    "mysql+pymysql://u:SSS%40@h/x": "mysql+pymysql://(hidden)@h/x",
    "s3://KEY:SSS@bucket/x": "s3://(hidden)@bucket/x",
    "https://SSS@host/x": "https://(hidden)@host/x",
    "user:SSS@host.org": "(hidden)@host.org",
    "https://h/x?sig=SSS&se=1": "https://h/x?sig=(hidden)&se=1",
    "https://h/x?X-Amz-Signature=SSS": "https://h/x?X-Amz-Signature=(hidden)",
    "https://h/#access_token=SSS": "https://h/#access_token=(hidden)",
    "https://h/x?pwd=SSS": "https://h/x?pwd=(hidden)",
    "AccountName=a;AccountKey=SSS==;x": "AccountName=a;AccountKey=(hidden)",
    "WANDB_API_KEY=SSS python train.py": "WANDB_API_KEY=(hidden) python train.py",
    "--password SSS --lr 0.1": "--password (hidden) --lr 0.1",
    '{"password": "SSS", "lr": 1}': '{"password": "(hidden)", "lr": 1}',
    "//u:SSS@h/x": "//(hidden)@h/x",
    "password=SS,SSS": "password=(hidden)",
    "password=SS;SSS lr=1": "password=(hidden) lr=1",
    "password=a(SSS": "password=(hidden)",
    "Config(password=SSS, lr=1)": "Config(password=(hidden), lr=1)",
    r'{"password": "a\"b SSS", "lr": 1}': '{"password": "(hidden)", "lr": 1}',
    r'"{\"password\": \"a SSS\", \"lr\": 1}"': r'"{\"password\": \"(hidden)\", \"lr\": 1}"',
    "{'password': 'it\\'s SSS', 'lr': 1}": "{'password': '(hidden)', 'lr': 1}",
    'password: "cut SSS': 'password: "(hidden)"',
    "password:ab@SSS.org": "password:(hidden)",
    "env: DB_PASSWORD=SSS": "env: DB_PASSWORD=(hidden)",
    "credentials: {'user': 'SSS', 'p': 'SSS'} x": "credentials: (hidden) x",
    "--password -SSS --lr 0.1": "--password (hidden) --lr 0.1",
    "--use-token --api-token SSS": "--use-token --api-token (hidden)",
    "['run', '--password', 'SSS']": "['run', '--password', '(hidden)']",
    "Authorization: token SSSSSS": "Authorization: (hidden)",
    "-H 'Authorization: token SSS' -v": "-H 'Authorization: (hidden)' -v",
    "Authorization: Digest username=SSS, response=SSS": "Authorization: (hidden)",
    "https://h/x?hftoken=SSS&a=1": "https://h/x?hftoken=(hidden)&a=1",
    "https://h/x?key=SSS": "https://h/x?key=(hidden)",
    "Bearer eySSS": "Bearer (hidden)",
    "Authorization: Bearer SSSSSS": "Authorization: (hidden)",
    "Basic dXNlcjSSSdw==": "Basic (hidden)",
    "hf_abcdefghSSS": "(hidden)",
    "-----BEGIN PRIVATE KEY-----\nSSS\n-----END PRIVATE KEY-----": "(hidden)",
}


@pytest.mark.parametrize("text", SECRET_TEXTS)
def test_credentials_within_a_text_are_hidden(text: str) -> None:
    """What stands around them stays readable."""
    assert without_credentials(text) == SECRET_TEXTS[text]
    assert "SSS" not in str(hidden("options", {"anything": [text]}))


@pytest.mark.parametrize(
    "text",
    [
        "s3://bucket/path@v1/file",
        "https://host:8080/a@b/c",
        "http://host:8080?x=a@b",
        "http://host:8080/x?y=a@b",
        "http://host:8080#x=a@b",
        "http://host?x=a:b@c",
        "mongodb://h1:27017,h2:27017/?appName=@x@",
        "mongodb://h1:27017,[::1]:27017,h3/?appName=@x@",
        "tcp://127.0.0.1:8786",
        "http://[::1]:80/x@y",
        "git@github.com:x/y.git",
        "lr=0.1, step: 3, token=3",
        "ValueError: shapes: (3, 4)",
        "KeyError: 'token'",
        "--pad-token <pad>",
        "basic Training",
        "s3://b/x?versionId=abc",
        "return code=abc",
        "timm:resnet50@v1",
        "timm:resnet50@v1.2",
        "docker://repo:tag@sha256:abc",
        "nvidia/pytorch:24.01@sha256:abc",
        "path//name:x/y@v1",
        "ssh://git@github.com/x/y.git",
        "abfss://container@account.dfs.core.windows.net/x",
        '{"url":"s3://b","to":"x:y@z"}',
        "https://h/x?sort_key=a",
        "--use-auth --lr 0.1",
        "password: (hidden)",
    ],
)
def test_a_text_without_credentials_stays(text: str) -> None:
    """Addresses, versions and errors are no secrets."""
    assert without_credentials(text) == text


def test_secrets_in_lists_of_arguments_and_variables_are_hidden() -> None:
    """The argument after an option, and a variable's value, belong to the name before them."""
    assert hidden("args", ["--password", "x", "--lr", "0.1"])[1::2] == [HIDDEN, "0.1"]
    variables = [{"name": "WANDB_API_KEY", "value": "x"}, {"name": "LR", "value": "1"}]
    assert [each["value"] for each in hidden("env", variables)] == [HIDDEN, "1"]
    assert hidden("secrets", {"a": "x"}) == HIDDEN
