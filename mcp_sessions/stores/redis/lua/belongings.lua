-- What belongs to a session: who holds what one process keeps of it, subscriptions, state, request
-- keys, data; and all of it at once.

-- script claim: session
-- ARGV: who claims it (empty: nobody), instead of whom (empty: nobody). Who has it.
if redis.call('EXISTS', base) == 0 then
    return false
end
local holder = redis.call('HGET', base, 'holder')
if ARGV[1] ~= '' and (not holder or holder == ARGV[2]) then
    redis.call('HSET', base, 'holder', ARGV[1])
    return ARGV[1]
end
return holder

-- script change: session log story
-- ARGV: a field of the record, and its new value; none: it is removed. 'log': the value is the
-- events' new epoch. 'lists': a token and the URIs that are subscribed from now on follow. 'story':
-- time and text of each entry.
-- Nothing if the session is not there. 1: the field has another value now; 0: it had this one. Of
-- 'lists': the subscriptions that there were, and their tokens.
local field, value = ARGV[1], ARGV[2]
local mode, ends = unpack(redis.call('HMGET', base, 'mode', 'ends'))
if not ends then
    return false
end
if field == 'log' then
    if mode == 'protocol' then
        renew(new_log('events', value))
    end
    return 1
end
if field == 'story' then
    for i = 2, #ARGV, 2 do
        tell(ARGV[i], ARGV[i + 1])
    end
    return 1
end
if field == 'lists' then
    local uris, bytes = base .. ':u', 0
    local before = redis.call('HGETALL', uris)
    redis.call('UNLINK', uris)
    for i = 4, #ARGV do
        redis.call('HSET', uris, ARGV[i], ARGV[3])
        bytes = bytes + #ARGV[i]
    end
    share_lifetime(uris)
    redis.call('HSET', base, 'lists', value, 'uris', ARGV[3], 'ub', whole(bytes))
    return before
end
if not value then
    return redis.call('HDEL', base, field)
end
local before = redis.call('HGET', base, field)
redis.call('HSET', base, field, value)
return before ~= value and 1 or 0

-- script subscribe: session
-- ARGV: uri, token, most subscriptions, most bytes of them. What came of it, and what changed the
-- subscriptions before.
local ends, before, bytes = unpack(redis.call('HMGET', base, 'ends', 'uris', 'ub'))
if not ends then
    return { 'gone' }
end
local uris = base .. ':u'
if redis.call('HEXISTS', uris, ARGV[1]) == 0 then
    bytes = tonumber(bytes or 0) + #ARGV[1]
    if redis.call('HLEN', uris) >= tonumber(ARGV[3]) then
        return { 'max_subscriptions' }
    end
    if bytes > tonumber(ARGV[4]) then
        return { 'max_subscription_bytes' }
    end
    redis.call('HSET', base, 'ub', whole(bytes))
end
redis.call('HSET', uris, ARGV[1], ARGV[2])
share_lifetime(uris)
redis.call('HSET', base, 'uris', ARGV[2])
return { 'subscribed', before }

-- script unsubscribe: session
-- ARGV: uri, token. Whether the session is there, the token of the subscription, and what changed
-- the subscriptions before.
if redis.call('EXISTS', base) == 0 then
    return { 0 }
end
local token = redis.call('HGET', base .. ':u', ARGV[1])
if redis.call('HDEL', base .. ':u', ARGV[1]) == 1 then
    redis.call('HINCRBY', base, 'ub', -#ARGV[1])
end
local before = redis.call('HGET', base, 'uris')
redis.call('HSET', base, 'uris', ARGV[2])
return { 1, token, before }

-- script change_state: session
-- ARGV: what changed the subscriptions that are known, whether the client's description is known,
-- most bytes, version that is expected (empty: any), how many keys are removed, they, then key and
-- value of each that changed
if redis.call('EXISTS', base) == 0 then
    return false
end
if ARGV[4] ~= '' and ARGV[4] ~= (redis.call('HGET', base, 'statev') or '0') then
    return { 'newer', record(ARGV[1], ARGV[2]) }
end
local state, removed = base .. ':s', tonumber(ARGV[5])
local newest = {}
local before = redis.call('HGETALL', state)
for i = 1, #before, 2 do
    newest[before[i]] = #before[i + 1]
end
for i = 6, 5 + removed do
    newest[ARGV[i]] = nil
end
for i = 6 + removed, #ARGV, 2 do
    newest[ARGV[i]] = #ARGV[i + 1]
end
local total = 0
for key, size in pairs(newest) do
    total = total + #key + size
end
if total > tonumber(ARGV[3]) then
    return 'max_state_bytes'
end
for i = 6, 5 + removed do
    redis.call('HDEL', state, ARGV[i])
end
for i = 6 + removed, #ARGV, 2 do
    redis.call('HSET', state, ARGV[i], ARGV[i + 1])
end
share_lifetime(state)
redis.call('HINCRBY', base, 'statev', 1)
return record(ARGV[1], ARGV[2])

-- script finish: session keys
-- ARGV: key, whether there is an answer, answer, now, most bytes of keys, lifetime of keys
if redis.call('EXISTS', base) == 0 then
    return 0
end
local all = open_keys(ARGV[5], ARGV[6])
return finish_key(all, ARGV[1], ARGV[2] == '1', ARGV[3], tonumber(ARGV[4])) and 1 or 0

-- script load_data: session
if redis.call('EXISTS', base) == 0 then
    return false
end
return { redis.call('HGET', base, 'datav'), redis.call('GET', base .. ':d') }

-- script replace_data: session
-- ARGV: the version it must have, the version it gets, the value
local version = redis.call('HGET', base, 'datav')
if redis.call('EXISTS', base) == 0 or (version or '0') ~= ARGV[1] then
    return 0
end
redis.call('SET', base .. ':d', ARGV[3])
redis.call('HSET', base, 'datav', ARGV[2])
share_lifetime(base .. ':d')
return 1

-- script whole: session log keys
-- ARGV: new log epoch
--
-- All of a session: its record; version and value of its data; what its GET stream carries; its
-- logs, each with its counters and events; its keys, in the order of finishing, running ones last.
local ends = redis.call('HGET', base, 'ends')
if not ends then
    return false
end
local logs = {}
for at, stream in ipairs(streams()) do
    local log = open_log(stream, ARGV[1], seconds(ends))
    logs[at] = {
        stream, log.epoch,
        {
            whole(log.head), whole(log.floor), whole(log.evicted), whole(log.count),
            whole(log.bytes),
        },
        redis.call('XRANGE', log.events, '-', '+'),
    }
end
open_keys('0', '0')
local order, known, found = redis.call('ZRANGE', finished, 0, -1), {}, {}
for _, key in ipairs(order) do
    known[key] = true
end
for _, name in ipairs(redis.call('HKEYS', entries)) do
    local key = string.sub(name, 3)
    if string.sub(name, 1, 2) == 'k:' and not known[key] then
        order[#order + 1] = key
    end
end
for i, key in ipairs(order) do
    local entry = get_key(key)
    if not entry then
        error('the record of a request key is gone')
    end
    found[i] = {
        key, entry.digest, entry.runner, entry.run or '', entry.scopes or '[]', exact(entry.at),
        entry.state, redis.call('HGET', entries, 'a:' .. key) or '',
    }
end
return {
    whole_record(), redis.call('HGET', base, 'datav'), redis.call('GET', base .. ':d'),
    redis.call('HGETALL', base .. ':c'), logs, found,
}

-- script add_whole: session log keys
-- ARGV: now; then lists, each after its length: fields of the record, of the state, of the
-- subscriptions, of what its GET stream carries; the data, or nothing; logs and their events; keys.
--
-- The place in the lists of the session that has this id already; or true: it is added.
local at = 1

local function take()
    at = at + 1
    return ARGV[at - 1]
end

local function take_optional()
    at = at + 2
    return optional(at - 2)
end

local now = tonumber(take())
if redis.call('EXISTS', base) == 1 then
    return redis.call('HGET', base, 'member') or ''
end
for _, suffix in ipairs({ '', ':s', ':u', ':c' }) do
    for _ = 1, tonumber(take()) do
        redis.call('HSET', base .. suffix, take(), take())
    end
end
local data = take_optional()
if data then
    redis.call('SET', base .. ':d', data)
end
for _ = 1, tonumber(take()) do
    local log = new_log(take(), take())
    log.head, log.floor, log.evicted = tonumber(take()), tonumber(take()), tonumber(take())
    for _ = 1, tonumber(take()) do
        local number, entry = tonumber(take()), { 't', take(), 'p', take() }
        local key, origin, name = take_optional(), take_optional(), take_optional()
        for member, value in pairs({ k = key, o = origin, c = name }) do
            if value then
                entry[#entry + 1], entry[#entry + 2] = member, value
            end
        end
        local payload = entry[4]
        redis.call('XADD', log.events, id_of(number), unpack(entry))
        if key then
            redis.call('HSET', log.by_key, identity(origin or nil, key),
                whole(number) .. ' ' .. #payload)
        end
        log.count, log.bytes = log.count + 1, log.bytes + #payload
    end
    save(log)
end
local count = tonumber(take())
if count > 0 then
    local all = open_keys('0', '0')
    for _ = 1, count do
        local key = take()
        local entry = {
            cost = tonumber(take()), digest = take(), runner = take(), run = take(),
            scopes = take(), at = tonumber(take()), state = take(), kept = 0,
        }
        local answer = take()
        if entry.state ~= 'running' then
            all.finished = all.finished + 1
            redis.call('ZADD', finished, all.finished, key)
        end
        if entry.state == 'answered' then
            entry.kept = #answer
            redis.call('HSET', entries, 'a:' .. key, answer)
            redis.call('ZADD', answered, all.finished, key)
        end
        put_key(key, entry)
        all.bytes, all.answers = all.bytes + entry.cost + entry.kept, all.answers + entry.kept
    end
    save_keys(all)
end
local times = redis.call('HMGET', base, 'expires', 'ends')
move_deadline(now, times[1], times[2])
return true
