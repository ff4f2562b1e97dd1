"""Protobuf messages of Envoy's external processing and of gRPC health checks, built at run time.

Only the fields that the picker reads or sets are declared, with the numbers of Envoy's ``external_processor.proto`` and
``base.proto``. Protobuf keeps fields that are not declared and ignores them. Enums are declared as integers, which have
the same encoding. The messages are in a descriptor pool of their own, so that other packages may declare them too.
"""

from __future__ import annotations

import re
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

SCHEMA: Final = """
message Value {
  int32 null_value = 1; double number_value = 2; string string_value = 3; bool bool_value = 4;
  Struct struct_value = 5; ListValue list_value = 6;
}
message ListValue { repeated Value values = 1; }
message Struct { map<string, Value> fields = 1; }
message Metadata { map<string, Struct> filter_metadata = 1; }

message HeaderValue { string key = 1; string value = 2; bytes raw_value = 3; }
message HeaderMap { repeated HeaderValue headers = 1; }
message HeaderValueOption { HeaderValue header = 1; int32 append_action = 3; bool keep_empty_value = 4; }
message HeaderMutation { repeated HeaderValueOption set_headers = 1; repeated string remove_headers = 2; }

message HttpHeaders { HeaderMap headers = 1; bool end_of_stream = 3; }
message HttpBody { bytes body = 1; bool end_of_stream = 2; }
message HttpTrailers { HeaderMap trailers = 1; }
message ProtocolConfiguration { int32 request_body_mode = 1; int32 response_body_mode = 2; }
message ProcessingRequest {
  HttpHeaders request_headers = 2; HttpHeaders response_headers = 3;
  HttpBody request_body = 4; HttpBody response_body = 5;
  HttpTrailers request_trailers = 6; HttpTrailers response_trailers = 7;
  Metadata metadata_context = 8; map<string, Struct> attributes = 9;
  bool observability_mode = 10; ProtocolConfiguration protocol_config = 11;
}

message StreamedBodyResponse { bytes body = 1; bool end_of_stream = 2; }
message BodyMutation { bytes body = 1; bool clear_body = 2; StreamedBodyResponse streamed_response = 3; }
message CommonResponse { int32 status = 1; HeaderMutation header_mutation = 2; BodyMutation body_mutation = 3; }
message HeadersResponse { CommonResponse response = 1; }
message BodyResponse { CommonResponse response = 1; }
message TrailersResponse { HeaderMutation header_mutation = 1; }
message HttpStatus { int32 code = 1; }
message ImmediateResponse { HttpStatus status = 1; HeaderMutation headers = 2; bytes body = 3; string details = 5; }
message ProcessingResponse {
  HeadersResponse request_headers = 1; HeadersResponse response_headers = 2;
  BodyResponse request_body = 3; BodyResponse response_body = 4;
  TrailersResponse request_trailers = 5; TrailersResponse response_trailers = 6;
  ImmediateResponse immediate_response = 7; Struct dynamic_metadata = 8;
}

message HealthCheckRequest { string service = 1; }
message HealthCheckResponse { int32 status = 1; }
"""

_Field = descriptor_pb2.FieldDescriptorProto
_SCALARS: Final = {
    "bool": _Field.TYPE_BOOL,
    "bytes": _Field.TYPE_BYTES,
    "double": _Field.TYPE_DOUBLE,
    "int32": _Field.TYPE_INT32,
    "string": _Field.TYPE_STRING,
}
_message: Final = re.compile(r"message (\w+) \{(.*?)\}", re.DOTALL).finditer
_field: Final = re.compile(r"(repeated )?(?:map<string, (\w+)>|(\w+)) (\w+) = (\d+);").finditer


def _add_field(message: Any, name: str, number: int, kind: str, *, is_repeated: bool = False) -> None:
    field = message.field.add(name=name, number=number)
    field.label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
    else:
        field.type, field.type_name = _Field.TYPE_MESSAGE, kind


def _add_map(message: Any, name: str, number: int, value: str) -> None:
    entry_name = f"{name.title().replace('_', '')}Entry"
    entry = message.nested_type.add(name=entry_name)
    entry.options.map_entry = True
    _add_field(entry, "key", 1, "string")
    _add_field(entry, "value", 2, f".{value}")
    _add_field(message, name, number, f".{message.name}.{entry_name}", is_repeated=True)


def _classes() -> dict[str, Any]:
    """The message classes of the schema, by name."""
    file = descriptor_pb2.FileDescriptorProto(name="warmpath_picker.proto", syntax="proto3")
    for name, fields in (match.groups() for match in _message(SCHEMA)):
        message = file.message_type.add(name=name)
        for repeated, map_value, kind, field, number in (match.groups() for match in _field(fields)):
            if map_value:
                _add_map(message, field, int(number), map_value)
            else:
                type_name = kind if kind in _SCALARS else f".{kind}"
                _add_field(message, field, int(number), type_name, is_repeated=bool(repeated))
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    names = [message.name for message in file.message_type]
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(name)) for name in names}


_by_name: Final = _classes()
ProcessingRequest: Final = _by_name["ProcessingRequest"]
ProcessingResponse: Final = _by_name["ProcessingResponse"]
HealthCheckRequest: Final = _by_name["HealthCheckRequest"]
HealthCheckResponse: Final = _by_name["HealthCheckResponse"]
