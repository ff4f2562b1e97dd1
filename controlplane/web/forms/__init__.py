"""Forms. What a value may be is decided where it is used: by the services, and for settings by the routers' schema."""
