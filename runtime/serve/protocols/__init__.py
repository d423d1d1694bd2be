"""The protocols: requests of OpenAI's and Anthropic's interfaces, and answers in their form."""
