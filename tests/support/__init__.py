"""What tests share: small models and packs, plain twins, references, recorders."""
