"""Commands that say, of words that they do not take, what their users mostly mean."""

import click


class HintedCommand(click.Command):
    """A command with words of its own for some errors of its usage."""

    def words(self, error: click.UsageError) -> str:
        """Returns the message for an error; "" leaves click's."""
        raise NotImplementedError

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parses as click does; raises UsageError."""
        try:
            return super().parse_args(ctx, args)
        except click.UsageError as error:
            if not (text := self.words(error)):
                raise
            raise click.UsageError(text, ctx) from error


class ConfigCommand(HintedCommand):
    """A command over a training configuration, whose keys users of other trainers take for options."""

    def words(self, error: click.UsageError) -> str:
        """Returns which key an unknown option is, in place of options that look like it."""
        if not isinstance(error, click.NoSuchOption):
            return ""
        from ..core.config import key_named
        from ..train.config.train_config import TrainConfig

        key = key_named(TrainConfig, error.option_name.lstrip("-").replace("-", "_"))
        if not key:
            return ""
        return f"No such option {error.option_name!r}. It is a key of the configuration: --set {key}=VALUE."


class PromptCommand(HintedCommand):
    """A command that takes a prompt as one word of the shell."""

    def words(self, error: click.UsageError) -> str:
        """Returns what to do about a second word."""
        text = error.format_message()
        return f'{text}. A prompt of several words needs quotes: "two words".' if "unexpected extra" in text else ""
