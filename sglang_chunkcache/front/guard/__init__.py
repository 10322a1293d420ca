"""What SGLang's own endpoints and parameters do not check:
requests that end its server, slow patterns, types of parameters."""
