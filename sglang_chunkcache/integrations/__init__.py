"""Other people's frameworks on a running server, over HTTP: no torch, no SGLang, no `openai`."""
