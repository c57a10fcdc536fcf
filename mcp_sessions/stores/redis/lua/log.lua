-- The event log of one stream: what core/log.py decides, in the step that stores it. The
-- same tests run on both.
--
-- A log is a field l:<stream> of the session's hash (its counters), a Redis stream :e:<stream>
-- (its events, entry id <number>-0) and a hash :k:<stream> (coalescing key -> number, size).

-- Which history the data set belongs to. A server that was promoted or started again has
-- another id than before, and may have lost what it acknowledged last.
local known_incarnation

local function incarnation()
    if not known_incarnation then
        local info = redis.pcall('INFO', 'replication')
        known_incarnation = type(info) == 'string' and string.match(info, 'master_replid:(%x+)')
            or '?'
    end
    return known_incarnation
end

-- Numbers that a log without bound skips after a loss: more than can have been lost.
local SKIPPED = 1000000
local LAST_NUMBER = 999999999999

local function save(log)
    redis.call('HSET', base, 'l:' .. log.stream, string.format(
        '%s %s %.0f %.0f %.0f %.0f %.0f %.0f %.17g', log.incarnation, log.epoch, log.head,
        log.floor, log.evicted, log.count, log.bytes, log.first, log.first_at))
end

local function new_log(stream, epoch)
    return {
        stream = stream, epoch = epoch, incarnation = incarnation(), head = 0, floor = 0,
        evicted = 0, count = 0, bytes = 0, first = 0, first_at = 0,
        events = base .. ':e:' .. stream, by_key = base .. ':k:' .. stream,
    }
end

-- Empties a log.
local function renew(log)
    redis.call('UNLINK', log.events, log.by_key)
    save(log)
    return log
end

-- A log from its counters; nil: they are none of ours.
local function read_log(stream, packed)
    local known, own, head, floor, evicted, count, bytes, first, first_at = string.match(packed,
        '^(%S+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%d+) (%S+)$')
    if not tonumber(first_at or '') then
        return nil
    end
    local log = new_log(stream, own)
    log.head, log.floor, log.evicted = tonumber(head), tonumber(floor), tonumber(evicted)
    log.count, log.bytes = tonumber(count), tonumber(bytes)
    log.first, log.first_at = tonumber(first), tonumber(first_at)
    return log, known
end

-- The log, or nil. Where the data set may have lost events since it was written, it begins
-- anew under `epoch`: a number is never issued twice in one epoch, and a position from
-- before is refused instead of being answered with a hole.
local function open_log(stream, epoch, ends)
    local packed = redis.call('HGET', base, 'l:' .. stream)
    if not packed then
        return nil
    end
    local log, known = read_log(stream, packed)
    local is_whole = log and redis.call('XLEN', log.events) == log.count
    if is_whole and known == log.incarnation then
        return log
    end
    -- Attachments may have been lost with the events: see attach in events.lua.
    redis.call('HINCRBY', base, 'lost', 1)
    if is_whole and stream == 'events' and ends == math.huge then
        -- An ACP agent's session: what is left of its log is kept.
        log.head = log.head + SKIPPED
        save(log)
        return log
    end
    return renew(new_log(stream, epoch))
end

local function is_response(stream)
    return stream ~= 'events' and stream ~= 'get'
end

local function drop_stream(stream)
    redis.call('HDEL', base, 'l:' .. stream)
    redis.call('ZREM', base .. ':r', stream)
    redis.call('UNLINK', base .. ':e:' .. stream, base .. ':k:' .. stream)
end

local function open_or_make_log(stream, epoch, ends)
    local log = open_log(stream, epoch, ends)
    if not log then
        log = new_log(stream, epoch)
        save(log)
    end
    return log
end

local function members_of(entry)
    local members = {}
    for i = 1, #entry[2], 2 do
        members[entry[2][i]] = entry[2][i + 1]
    end
    return members
end

local function id_of(number)
    return whole(number) .. '-0'
end

local function number_of(entry)
    return tonumber(string.match(entry[1], '^%d+'))
end

local function remove(log, number, size)
    redis.call('XDEL', log.events, id_of(number))
    log.count, log.bytes = log.count - 1, log.bytes - size
    if number == log.first then
        log.first = 0
    end
end

-- Each session that shares a connection's stream has coalescing keys of its own.
local function identity(origin, key)
    return (origin or '') .. ' ' .. key
end

local function forget(log, entry)
    local number, members = number_of(entry), members_of(entry)
    remove(log, number, #members.p)
    if members.k then
        local own = identity(members.o, members.k)
        local newest = redis.call('HGET', log.by_key, own)
        if newest and tonumber(string.match(newest, '^%d+')) == number then
            redis.call('HDEL', log.by_key, own)
        end
    end
end

-- window: the greatest number of events, of bytes and the greatest age.
local function evict(log, now, window)
    while log.count > 0 do
        local oldest
        if log.first == 0 then
            oldest = redis.call('XRANGE', log.events, '-', '+', 'COUNT', 1)[1]
            log.first, log.first_at = number_of(oldest), tonumber(members_of(oldest).t)
        end
        if log.first_at >= now - window.age then
            if log.count <= window.events and (log.bytes <= window.bytes or log.count == 1) then
                return
            end
            log.evicted = log.first
        end
        log.floor = log.first
        if not oldest then
            oldest = redis.call('XRANGE', log.events, '-', '+', 'COUNT', 1)[1]
        end
        forget(log, oldest)
    end
end

-- Of a script that takes the moment: see events.lua.
local function window_of(log, ends)
    if log.stream == 'events' and ends == math.huge then
        return { events = math.huge, bytes = math.huge, age = math.huge }
    end
    return { events = tonumber(ARGV[3]), bytes = tonumber(ARGV[4]), age = tonumber(ARGV[5]) }
end

-- What a GET stream carries of a session: the fencing epoch, and epoch and number of the last event
-- that is there. Nothing: it does not carry it.
local function carried(origin)
    local fence, epoch, number = string.match(
        redis.call('HGET', base .. ':c', origin) or '', '^(%d+) (%d+) (%d+)$')
    return tonumber(fence), epoch, tonumber(number)
end

-- Takes one session's events off a connection's stream. They stand in their own log: the floor
-- stays.
local function drop_origin(stream, origin, epoch, ends)
    local log = open_log(stream, epoch, ends)
    if not log then
        return
    end
    for _, entry in ipairs(redis.call('XRANGE', log.events, '-', '+')) do
        if members_of(entry).o == origin then
            forget(log, entry)
        end
    end
    save(log)
end

-- Another process's clock may differ from that of the one that stores this event.
local SKEW, STEP_BACK = 600, 64

-- The number and the payload of the event that has this name, since it was first tried to store it;
-- or nil. Of one that was replaced, or left the window, nothing is known.
local function stored_before(log, name, since)
    local from = '+'
    while true do
        local entries = redis.call('XREVRANGE', log.events, from, '-', 'COUNT', STEP_BACK)
        for _, entry in ipairs(entries) do
            local members = members_of(entry)
            if members.c == name then
                return number_of(entry), members.p
            end
            if tonumber(members.t) < since - SKEW then
                return nil
            end
        end
        if #entries < STEP_BACK then
            return nil
        end
        from = '(' .. entries[#entries][1]
    end
end

-- Stores an event, and notifies those that watch the stream, in one step. Returns its payload, who is
-- attached (or false), the fencing epoch and whether it replaced an older one (1). `name`: of the event
-- in its log, if it has one.
local function append(log, now, window, before, after, key, origin, name)
    if log.head >= LAST_NUMBER then
        error('EVENTIDS')
    end
    log.head = log.head + 1
    local payload = before
    if after then
        payload = before .. log.epoch .. '-' .. string.format('%012.0f', log.head) .. after
    end
    local entry = { 'p', payload, 't', exact(now) }
    local replaced = false
    if key then
        local own = identity(origin, key)
        replaced = redis.call('HGET', log.by_key, own)
        if replaced then
            local number, size = string.match(replaced, '^(%d+) (%d+)$')
            remove(log, tonumber(number), tonumber(size))
        end
        redis.call('HSET', log.by_key, own, whole(log.head) .. ' ' .. #payload)
        if not replaced then
            share_lifetime(log.by_key)
        end
        entry[#entry + 1], entry[#entry + 2] = 'k', key
    end
    if origin then
        entry[#entry + 1], entry[#entry + 2] = 'o', origin
    end
    if name then
        entry[#entry + 1], entry[#entry + 2] = 'c', name
    end
    redis.call('XADD', log.events, id_of(log.head), unpack(entry))
    log.count, log.bytes = log.count + 1, log.bytes + #payload
    if log.count == 1 then
        log.first, log.first_at = log.head, now
        share_lifetime(log.events)
    end
    evict(log, now, window)
    save(log)
    local attached = redis.call('HMGET', base, 'conn', 'fence')
    local connection, fence = attached[1], attached[2]
    redis.call('PUBLISH', base .. ':w:' .. log.stream, table.concat({
        log.epoch, ' ', whole(log.head), ' ', exact(now), ' ', fence, ' ',
        connection and #connection or -1, ' ', key and #key or -1, ' ', origin and #origin or -1,
        '\n', connection or '', key or '', origin or '', payload,
    }))
    return payload, connection, fence, replaced and 1 or 0
end

-- The entries after a number: `limit` at the most, and no more once they have `size` bytes.
local STEP = 16
local function page(log, number, limit, size)
    local found, from = {}, number
    while #found < limit do
        local count = math.min(STEP, limit - #found)
        local entries = redis.call(
            'XRANGE', log.events, '(' .. id_of(from), '+', 'COUNT', whole(count))
        for _, entry in ipairs(entries) do
            found[#found + 1] = entry
            size = size - #members_of(entry).p
            if size <= 0 then
                return found
            end
        end
        if #entries < count then
            return found
        end
        from = number_of(entries[#entries])
    end
    return found
end

-- The entries after a position, or nil and the reason. From `at` on, ARGV has why the position is
-- none, its epoch and its number.
-- `limit`: of a page, or '' for all of them.
local function since(log, ends, at, limit, size)
    local reason, epoch, number = ARGV[at], ARGV[at + 1], tonumber(ARGV[at + 2])
    evict(log, tonumber(ARGV[1]), window_of(log, ends))
    save(log)
    if reason ~= '' then
        return nil, reason
    end
    -- Epoch before number: a log made anew soon grows past the old one (CUP8).
    if epoch ~= log.epoch then
        return nil, epoch > log.epoch and 'unknown_position' or 'log_replaced'
    end
    if number > log.head then
        return nil, 'ahead'
    end
    if number < log.floor then
        return nil, number < log.evicted and 'evicted' or 'expired'
    end
    if limit ~= '' then
        return page(log, number, tonumber(limit), tonumber(size))
    end
    return redis.call('XRANGE', log.events, '(' .. id_of(number), '+')
end
