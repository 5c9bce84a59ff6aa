"""The engine: schema, library, toy worlds, and the scripts that accelerate launches."""
