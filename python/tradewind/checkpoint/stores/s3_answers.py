"""What S3's answers, and their absence, mean: from botocore's exceptions to StoreError."""

from __future__ import annotations

from typing import Any

from tradewind.checkpoint.stores.patience import StoreError

EXISTS = 412  # PreconditionFailed of If-None-Match: *
CONFLICT = 409  # two conditional writes of one key at once: either may be tried again
NOT_THERE = 404
NOT_SATISFIABLE = 416

_TRANSIENT_STATUSES = {CONFLICT, 429, 500, 502, 503, 504}
TRANSIENT_CODES = {
    "BadDigest",  # the bytes changed on the way: sent anew
    "InternalError",
    "OperationAborted",
    "RequestLimitExceeded",
    "RequestTimeout",
    "ServiceUnavailable",
    "SlowDown",
    "Throttling",
    "ThrottlingException",
}
_LOGIN = "check the AWS credentials of this process (environment, profile or instance role)"
_REGION = "set AWS_REGION to the bucket's region, or AWS_ENDPOINT_URL to the right store"
_ADVICE = {
    "AccessDenied": "allow s3:ListBucket on the bucket, and s3:GetObject, s3:PutObject, "
    "s3:DeleteObject and s3:AbortMultipartUpload on what is below the prefix",
    "AllAccessDisabled": "the bucket is locked; choose another",
    "AuthorizationHeaderMalformed": _REGION,
    "BadDigest": "the bytes read from the local file are not those that were written there: the "
    "disk or the memory is failing",
    "EntityTooLarge": "the store takes no object that large; save with more ranks",
    "ExpiredToken": "the session's credentials have expired; renew them",
    "IllegalLocationConstraintException": _REGION,
    "InvalidAccessKeyId": _LOGIN,
    "NoSuchBucket": "make the bucket, or correct the URL",
    "NotImplemented": "this store does not have what the commit protocol needs (conditional writes "
    "by If-None-Match, multipart uploads); use one that does",
    "PermanentRedirect": _REGION,
    "QuotaExceeded": "the store is full; make room, or lower keep=",
    "RequestTimeTooSkewed": "the clock of this machine is wrong; set it",
    "SignatureDoesNotMatch": _LOGIN,
}
_SILENT_ADVICE = "check the network and AWS_ENDPOINT_URL"
# By name, so that botocore need not be loaded to read this table.
_PERMANENT_FAULTS = {
    "CredentialRetrievalError": _LOGIN,
    "InvalidEndpointDiscoveryConfigurationError": _REGION,
    "NoCredentialsError": _LOGIN,
    "NoRegionError": _REGION,
    "ParamValidationError": "correct the URL",
    "PartialCredentialsError": _LOGIN,
    "ProfileNotFound": _LOGIN,
    "SSLError": "the store's certificate is not trusted; set AWS_CA_BUNDLE",
    "TokenRetrievalError": _LOGIN,
    "UnauthorizedSSOTokenError": _LOGIN,
}


def translated(where: str, error: Exception) -> StoreError:
    """`error` of botocore as StoreError; `where` names the store and the operation."""
    response: dict[str, Any] | None = getattr(error, "response", None)
    if isinstance(response, dict):
        return _answered(where, response)
    kind = type(error).__name__
    advice = _PERMANENT_FAULTS.get(kind)
    text = str(error).rstrip(".")
    if advice is not None:
        return StoreError(f"{where}: {text}; {advice}", code=kind)
    return StoreError(f"{where}: {kind}: {text}; {_SILENT_ADVICE}", transient=True, code=kind)


def _answered(where: str, response: dict[str, Any]) -> StoreError:
    told = response.get("Error", {})
    facts = response.get("ResponseMetadata", {})
    code, status = str(told.get("Code", "")), int(facts.get("HTTPStatusCode", 0))
    text = f"{where}: {status} {code}"
    if told.get("Message"):
        text += f": {str(told['Message']).rstrip('.')}"
    region = facts.get("HTTPHeaders", {}).get("x-amz-bucket-region")
    advice = _ADVICE.get(code) or (_ADVICE["AccessDenied"] if status == 403 else "")
    if advice == _REGION and region:
        advice = f"the bucket is in {region}: {_REGION}"
    if advice:
        text += f"; {advice}"
    transient = status in _TRANSIENT_STATUSES or code in TRANSIENT_CODES
    return StoreError(text, transient=transient, status=status, code=code)
