"""Generated from proto/kvpool/v1/metadata.proto by scripts/generate_protos; do not edit."""
