// What can go wrong, in Chinese. The server explains errors in English, in the words of the command line; what stands
// in parentheses here is kept, $1 and so on.

const CHINESE = [
  [/^the text has (\d+) tokens$/, "文本有 $1 个词元"],
  [/^a board has at most (\d+), so shorten it$/, "棋盘最多 $1 个，请缩短"],
  [/^(?:source|target) has ([\d,]+) characters$/, "文本有 $1 个字符"],
  [/^at most ([\d,]+)$/, "最多 $1 个"],
  [/^(?:source|target) holds half of a surrogate pair$/, "文本里有半个代理对"],
  [/^send valid Unicode$/, "请输入有效的 Unicode"],
  [/^no text was given$/, "没有文本"],
  [/^(?:type or paste one|paste a text to write titles for)$/, "请输入或粘贴一段"],
  [/^there is no \[MASK\] in the text$/, "文本里没有 [MASK]"],
  [/^write \[MASK\], or hide a token$/, "请输入 [MASK]，或遮住一个词元"],
  [/^(\S+): its tokenizer has no \[MASK\]$/, "$1 的分词器没有 [MASK]"],
  [/^take a BERT-like model$/, "请换一个类似 BERT 的模型"],
  [/^(\S+): the playground takes a model with one stack and a language model head$/, "$1：游乐场需要单栈、带语言模型头的模型"],
  [/^take allmask-en, allmask-zh, or a BERT or GPT-2$/, "请用 allmask-en、allmask-zh，或 BERT、GPT-2"],
  [/^(\S+): there is no such model here$/, "这里没有模型 $1"],
  [/^there are: (.*)$/, "现有：$1"],
  [/^the playground is busy$/, "游乐场正忙"],
  [/^wait a moment$/, "请稍候"],
  [/^the server does not answer$/, "服务器没有回应"],
  [/^is `allmask play` still running\?$/, "allmask play 还在运行吗？"],
  [/^something went wrong here$/, "这里出错了"],
  [/^the terminal of the server has the traceback$/, "详情见服务器的终端"],
  [/^(\S+) trains models, which takes minutes$/, "$1 要训练模型，需要几分钟"],
];

/** A message in Chinese; one that is not known stays as it is. */
export function inChinese(message) {
  const known = CHINESE.find(([pattern]) => pattern.test(message));
  return known ? message.replace(...known) : message;
}
